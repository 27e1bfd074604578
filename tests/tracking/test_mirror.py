"""The tracker with a real MLflow database: one child run a recipe, real statuses, no step twice."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.job import StageListener, StageRun
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.store import experiment_id


def record(step, **metrics):
    """A line of the metrics file; step n was written n seconds after 1000 s."""
    return {
        "step": step,
        "total_steps": 4,
        "time": 1000.0 + step,
        "metrics": {name.replace("_", "/", 1): value for name, value in metrics.items()},
    }


@pytest.fixture
def tracker(uri, tmp_path):
    tracker = MlflowTracker(uri, tmp_path)
    tracker.describe("full", {"kedro.pipeline": "full"})
    return tracker


@pytest.fixture
def stage(tmp_path):
    directory = tmp_path / "workspace" / "ppo" / "f00d"
    (directory / "export").mkdir(parents=True)
    config = {
        "ppo": {"lr": 1e-6, "adaptive_kl": True, "lora": None, "betas": [0.9, 0.95]},
        "model": {"path": "tiny"},
    }
    digests = {"prompts": "d1", "sft_model": "d2"}
    return StageRun("ppo", "f00d", 7, config, {}, digests, directory, 60.0)


@pytest.fixture
def runs(client):
    """All runs below the parents, oldest first."""

    def find():
        experiment = experiment_id(client)
        found = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
        return [run for run in found if "rlhf.stage" in run.data.tags]

    return find


@pytest.fixture
def parents(client):
    def find():
        experiment = experiment_id(client)
        found = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
        return [run for run in found if "rlhf.stage" not in run.data.tags]

    return find


def history(client, run, name):
    """(step, milliseconds, value) of every logged point."""
    points = client.get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.timestamp, point.value) for point in points)


def write_metrics(stage, *records):
    stage.metrics_file.write_text("".join(json.dumps(item) + "\n" for item in records))


def report(tracker, stage, records):
    """The stage writes further records, and the tracker looks at its directory."""
    with stage.metrics_file.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in records)
    tracker.stage_metrics(stage, records)
    tracker.reconcile()


def write_manifest(stage, metrics):
    Manifest(stage.stage, stage.fingerprint, 7, stage.config, stage.digests, {}, metrics, {}).write(
        stage.export
    )


def test_a_finished_stage_is_one_child_run(tracker, stage, client, runs, parents):
    listeners = StageListener(tracker)
    listeners.stage_started(stage)
    report(
        tracker,
        stage,
        [record(1, objective_kl=0.5), record(2, objective_kl=0.75, policy_loss=0.25)],
    )
    report(tracker, stage, [record(3, objective_kl=1.0)])
    listeners.stage_ended(stage, "FINISHED", {"result/score": 2.5, "objective/kl": 1.0})
    tracker.end("FINISHED")

    (parent,), (child,) = parents(), runs()
    assert (parent.info.run_name, parent.info.status) == ("full", "FINISHED")
    assert parent.data.tags["kedro.pipeline"] == "full"
    assert (child.info.run_name, child.info.status) == ("ppo f00d", "FINISHED")
    assert child.data.tags == {
        "mlflow.parentRunId": parent.info.run_id,
        "mlflow.runName": "ppo f00d",
        "rlhf.stage": "ppo",
        "rlhf.driver": this_process(),
        "rlhf.fingerprint": "f00d",
        "rlhf.directory": str(stage.directory),
        "rlhf.input.prompts": "d1",
        "rlhf.input.sft_model": "d2",
    }
    assert child.data.params == {
        "ppo.lr": "1e-06",
        "ppo.adaptive_kl": "true",
        "ppo.lora": "null",
        "ppo.betas": "[0.9, 0.95]",
        "model.path": "tiny",
        "seed": "7",
    }
    assert history(client, child, "objective/kl") == [
        (1, 1_001_000, 0.5),
        (2, 1_002_000, 0.75),
        (3, 1_003_000, 1.0),  # one point, although the result repeats it
    ]
    assert history(client, child, "policy/loss") == [(2, 1_002_000, 0.25)]
    assert history(client, child, "result/score") == [
        (3, 1_003_000, 2.5)
    ]  # the result belongs to the last step


def test_the_metrics_of_the_best_model_have_separate_names(tracker, stage, client, runs):
    tracker.stage_started(stage)
    report(tracker, stage, [record(1, eval_loss=0.5), record(2, eval_loss=0.75)])
    result = {"step": 1, "eval/loss": 0.5, "eval/entropy": 2.0}
    run = replace(stage, headline_metrics=("eval/loss", "train/loss"))
    tracker.stage_ended(run, "FINISHED", result)
    (child,) = runs()
    assert history(client, child, "eval/loss") == [(1, 1_001_000, 0.5), (2, 1_002_000, 0.75)]
    assert child.data.metrics == {"eval/loss": 0.75, "exported/eval_loss": 0.5, "exported/step": 1}
    assert child.data.tags["mlflow.note.content"].splitlines() == [
        "The exported model, of step 1:",
        "",
        "| metric | value |",
        "|---|---|",
        "| eval/loss | 0.5 |",
        "| eval/entropy | 2 |",
    ]


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_an_unsuccessful_stage_has_its_real_status(tracker, stage, runs, parents, status):
    tracker.stage_started(stage)
    assert runs()[0].info.status == "RUNNING"
    tracker.stage_ended(stage, status, {})
    tracker.end(status)
    assert runs()[0].info.status == parents()[0].info.status == status
    tracker.stage_started(replace(stage, fingerprint="beef"))  # another recipe has another run
    assert [run.data.tags["rlhf.fingerprint"] for run in runs()] == ["f00d", "beef"]


def test_more_than_fits_in_one_request(tracker, stage, client, runs):
    """MLflow takes 100 parameters and 1000 metrics a request."""
    stage = replace(stage, config={"ppo": {f"field_{number}": number for number in range(250)}})
    tracker.stage_started(stage)
    report(tracker, stage, [record(step, a=1.0, b=2.0) for step in range(1, 602)])
    tracker.stage_ended(stage, "FINISHED", {})
    (run,) = runs()
    assert len(run.data.params) == 251  # and the seed
    assert run.data.params["ppo.field_249"] == "249"
    assert len(history(client, run, "a")) == 601
    assert history(client, run, "b")[-1] == (601, 1_601_000, 2.0)


@pytest.mark.parametrize("status", ["FAILED", "KILLED", None])
def test_an_unfinished_run_is_resumed_without_a_step_twice(
    tracker, stage, uri, tmp_path, client, runs, status
):
    tracker.stage_started(stage)
    report(tracker, stage, [record(1, objective_kl=0.5), record(2, objective_kl=0.75)])
    if status is not None:  # None: the driver was killed, and MLflow says RUNNING
        tracker.stage_ended(stage, status, {})
    (before,) = runs()

    again = MlflowTracker(uri, tmp_path)
    again.describe("ppo", {})
    config = {**stage.config, "log": {"interval": 5}, "ppo": {**stage.config["ppo"], "lora": 4}}
    stage = replace(
        stage, config=config
    )  # MLflow refuses to change ppo.lora: the first attempt's value stays
    again.stage_started(stage)
    assert runs()[0].info.status == "RUNNING"
    write_metrics(stage, record(1, objective_kl=0.5))
    resumed = [{**record(step, objective_kl=0.75), "time": 5000.0 + step} for step in (2, 3)]
    report(again, stage, resumed)
    again.stage_ended(stage, "FINISHED", {})

    (after,) = runs()
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert after.data.tags["mlflow.parentRunId"] not in ("", before.data.tags["mlflow.parentRunId"])
    assert after.data.params["ppo.lora"] == "null"
    assert after.data.params["log.interval"] == "5"
    assert history(client, after, "objective/kl") == [
        (1, 1_001_000, 0.5),
        (2, 1_002_000, 0.75),
        (3, 5_003_000, 0.75),
    ]


def test_the_page_of_an_evaluation_is_an_artifact_of_its_run(tracker, stage, client, runs, caplog):
    tracker.stage_started(stage)
    write_manifest(stage, {})
    tracker.stage_ended(stage, "FINISHED", {})
    for page in ("<p>first", "<p>second"):
        tracker.log_page("f00d", page)
    tracker.log_page("of no run", "<p>")
    (run,) = runs()
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["evaluation.html"]
    path = client.download_artifacts(run.info.run_id, "evaluation.html")
    assert Path(path).read_text() == "<p>second"
    assert caplog.messages == []


def test_the_list_of_runs_shows_the_verdict(tracker, stage, client, runs, parents):
    stage = replace(stage, stage="evaluate")
    write_manifest(stage, {"win_rate/gold": 0.61})
    tracker.stage_started(stage)
    tracker.stage_ended(stage, "FINISHED", {"win_rate/gold": 0.61})
    evaluation = {
        "candidate": "ppo",
        "judge": "gold",
        "win_rates": {
            "gold": {"rate": 0.61, "lower": 0.52, "upper": 0.7},
            "score": {"rate": 0.8, "lower": 0.7, "upper": 0.9},
        },
        "policies": {"sft": {"score": 0.25}, "ppo": {"score": 1.5, "gold_score": 0.5}},
    }
    for _ in range(2):  # a second run that reuses the evaluation
        tracker.log_verdict("f00d", evaluation)
    for run in (*parents(), *runs()):
        assert run.data.tags["rlhf.verdict"] == "By the gold judge, PPO is better."
        columns = {name: run.data.metrics[name] for name in ("eval/win_rate", "eval/score")}
        assert columns == {"eval/win_rate": 0.61, "eval/score": 1.5}
        assert [value for _, _, value in history(client, run, "eval/win_rate")] == [0.61]


def test_a_store_that_refuses_the_page_costs_one_warning(tracker, monkeypatch, caplog):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refuse(*args, **kwargs):
        raise MlflowException("no space left")

    tracker.reconcile()
    monkeypatch.setattr(MlflowClient, "search_runs", refuse)
    tracker.log_page("f00d", "<p>")
    (warning,) = caplog.messages
    assert "does not record the page (MlflowException: no space left)" in warning


def test_a_reused_stage_is_linked_to_the_run_that_trained_it(
    tracker, stage, uri, tmp_path, runs, parents
):
    tracker.stage_started(stage)
    tracker.stage_ended(stage, "FINISHED", {})
    tracker.end("FINISHED")

    again = MlflowTracker(uri, tmp_path)
    again.describe("again", {})
    cached = replace(stage, cached=True)
    again.stage_started(cached)
    again.stage_ended(cached, "FINISHED", {"result/score": 1.0})
    again.end("FINISHED")
    (trained,) = runs()
    assert parents()[1].data.tags["rlhf.cached.ppo"] == trained.info.run_id
    assert "result/score" not in trained.data.metrics


def test_a_reused_stage_that_the_store_lacks_is_sent_from_disk(
    tracker, stage, client, runs, parents
):
    write_metrics(stage, record(1, objective_kl=0.5), record(2, objective_kl=0.75))
    with stage.metrics_file.open("a") as file:
        file.write('{"step": 3, "tot')  # a killed attempt left half a line
    write_manifest(stage, {"result/score": 2.5})
    cached = replace(stage, cached=True)
    tracker.stage_started(cached)
    tracker.stage_ended(cached, "FINISHED", {"result/score": 2.5})

    (child,) = runs()
    assert child.info.status == "FINISHED"
    assert (child.info.start_time, child.info.end_time) == (
        1_001_000,
        1_002_000,
    )  # when it was trained, not today
    assert child.data.tags["mlflow.parentRunId"] == parents()[0].info.run_id
    assert child.data.params["ppo.lr"] == "1e-06"
    assert history(client, child, "objective/kl") == [(1, 1_001_000, 0.5), (2, 1_002_000, 0.75)]
    assert history(client, child, "result/score") == [(2, 1_002_000, 2.5)]


def with_answers(step, text):
    answer = {"step": step, "prompt": "User: Why?", "answer": text, "score": 0.5, "kl": step / 4}
    return record(step, objective_kl=0.5) | {"answers": [answer]}


def test_sampled_answers_are_one_table_without_a_step_twice(tracker, stage, client, runs):
    """A resumed training takes step 2 again."""
    tracker.stage_started(stage)
    first, lost, again = (with_answers(*given) for given in ((1, "a"), (2, "b"), (2, "c")))
    for records in ([first], [first, lost], [first, again]):
        write_metrics(stage, *records, record(3, objective_kl=0.5))
        report(tracker, stage, [])
    (child,) = runs()
    table = client.load_table(experiment_id(client), "answers.json", [child.info.run_id])
    assert [*table.columns] == ["step", "prompt", "answer", "score", "kl"]
    assert [*table["answer"]] == ["a", "c"] and [*table["step"]] == [1, 2]
    write_metrics(stage)
    report(tracker, stage, [record(4, objective_kl=0.5)])  # without answers
    assert len(client.load_table(experiment_id(client), "answers.json")) == 2


def test_an_outage_costs_one_warning_and_the_stage_catches_up_at_its_end(
    tracker, stage, client, runs, monkeypatch, caplog
):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    tracker.stage_started(stage)
    report(tracker, stage, [record(1, objective_kl=0.5)])
    with monkeypatch.context() as outage, caplog.at_level(logging.WARNING):

        def refuse(*args, **kwargs):
            raise MlflowException("the store is down\nand a second line")

        outage.setattr(MlflowClient, "log_batch", refuse)
        report(tracker, stage, [record(2, objective_kl=0.75)])
        report(tracker, stage, [record(3, objective_kl=1.0)])
    assert [line.getMessage() for line in caplog.records] == [
        f"MLflow at {tracker._uri} does not record ppo (MlflowException: the store is down); "
        "training continues, metrics.jsonl has every number, and missing records are sent when the "
        "store answers again, at the latest by the next `kedro run` of the same stages"
    ]

    tracker.stage_ended(stage, "FINISHED", {"result/score": 2.5})
    (child,) = runs()
    assert child.info.status == "FINISHED"
    assert history(client, child, "objective/kl") == [
        (1, 1_001_000, 0.5),
        (2, 1_002_000, 0.75),
        (3, 1_003_000, 1.0),
    ]
    assert history(client, child, "result/score") == [(3, 1_003_000, 2.5)]


def test_an_unreachable_store_does_not_harm_a_stage(stage, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MlflowTracker(
        "http://user:secret@127.0.0.1:9", tmp_path
    )  # nothing listens on the discard port
    with caplog.at_level(logging.WARNING, logger="rlhf_pipeline"):
        tracker.describe("full", {})
        tracker.stage_started(stage)
        report(tracker, stage, [record(1, objective_kl=0.5)])
        tracker.stage_ended(stage, "FAILED", {})
        tracker.end("FAILED")
    messages = [
        line.getMessage() for line in caplog.records if line.name.startswith("rlhf_pipeline")
    ]
    assert [message.partition(" (")[0] for message in messages] == [
        "MLflow at http://...@127.0.0.1:9 does not record the pipeline run"
    ]
    assert "secret" not in caplog.text
    assert not (tmp_path / "mlartifacts").exists()  # no run has an end that waits for the store


def test_an_interruption_in_a_database_call_is_not_swallowed(tracker, stage, monkeypatch):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    tracker.stage_started(stage)

    def interrupted(*args, **kwargs):
        raise Interrupted("ended by SIGTERM")

    monkeypatch.setattr(
        SqlAlchemyStore, "_update_latest_metrics_if_necessary", interrupted
    )  # inside a transaction
    with pytest.raises(Interrupted, match="SIGTERM"):
        report(tracker, stage, [record(1, objective_kl=0.5)])


def test_a_run_id_in_the_environment_is_ignored(tracker, stage, client, runs, parents, monkeypatch):
    stranger = client.create_run(client.create_experiment("other"))
    monkeypatch.setenv("MLFLOW_RUN_ID", stranger.info.run_id)
    tracker.stage_started(stage)
    report(tracker, stage, [record(1, objective_kl=0.5)])
    tracker.stage_ended(stage, "FINISHED", {})
    tracker.end("FINISHED")
    untouched = client.get_run(stranger.info.run_id)
    assert (untouched.info.status, untouched.data.metrics) == ("RUNNING", {})
    assert runs()[0].data.tags["mlflow.parentRunId"] == parents()[0].info.run_id


def test_the_report_of_a_finished_stage_is_an_artifact_of_its_run(tracker, stage, client, runs):
    (stage.export / "report.json").write_text("{}")
    tracker.stage_started(stage)
    tracker.stage_ended(stage, "FAILED", {})
    (run,) = runs()
    assert client.list_artifacts(run.info.run_id) == []
    tracker.stage_started(stage)
    tracker.stage_ended(stage, "FINISHED", {})
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.json"]


@pytest.mark.parametrize("by", ["this run", "the next run"])
def test_a_report_that_an_outage_left_out_is_sent_later(
    tracker, stage, uri, tmp_path, client, runs, monkeypatch, caplog, by
):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    (stage.export / "report.json").write_text("{}")
    with monkeypatch.context() as outage, caplog.at_level(logging.WARNING):

        def refuse(*args, **kwargs):
            raise MlflowException("no space left")

        outage.setattr(MlflowClient, "log_artifact", refuse)
        tracker.stage_started(stage)
        tracker.stage_ended(stage, "FINISHED", {})
    (warning,) = caplog.messages
    assert "does not record ppo (MlflowException: no space left)" in warning
    if by == "this run":
        tracker.catch_up()
    else:
        tracker = MlflowTracker(uri, tmp_path)
        reused = replace(stage, cached=True)
        tracker.stage_started(reused)
        tracker.stage_ended(reused, "FINISHED", {})
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.json"]
