"""A `kedro run` succeeds without its MLflow server; a later run sends what is missing."""

import copy

import pytest
from ports import reserved_port


@pytest.mark.long
def test_the_next_run_sends_what_an_unreachable_server_missed(project, tmp_path):
    here = copy.copy(project)
    with reserved_port() as port:  # nothing listens at it
        here.uri = f"http://127.0.0.1:{port}"
        output = here.kedro("--nodes=sft,reward_model")
    assert output.count("does not record") == 1 and "ConnectionRefusedError" in " ".join(
        output.split()
    )

    here.uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert here.kedro("--nodes=sft,reward_model").count("finished earlier") == 2
    runs = {run.info.run_name.partition(" ")[0]: run for run in here.runs()}
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(
        ("sft+reward_model", "sft", "reward_model"), "FINISHED"
    )
    for stage in ("sft", "reward_model"):
        logged = here.client().get_metric_history(runs[stage].info.run_id, f"{stage}/loss")
        lines = (project.recipes(stage)[0] / "metrics.jsonl").read_text().splitlines()
        assert len(logged) == sum(f'"{stage}/loss"' in line for line in lines)
