"""The tracker with a real MLflow database: one child run a recipe, real statuses, no step twice.

Whatever fails, training continues, and one `reconcile` makes up for it.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages.job import StageListener, StageRun
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import mirror
from rlhf_pipeline.tracking.mirror import MlflowTracker, parameters, truncate
from rlhf_pipeline.tracking.store import EXPERIMENT, connect, experiment_id, request_limits

SOURCE = Path(mirror.__file__).parents[2]
EVALUATION = {
    "candidate": "ppo",
    "judge": "gold",
    "win_rates": {
        "gold": {"rate": 0.61, "lower": 0.52, "upper": 0.7},
        "score": {"rate": 0.8, "lower": 0.7, "upper": 0.9},
    },
    "policies": {"sft": {"score": 0.25}, "ppo": {"score": 1.5, "gold_score": 0.5}},
}


def record(step, **metrics):
    """A line of the metrics file; step n was written n seconds after 1000 s."""
    return {
        "step": step,
        "total_steps": 4,
        "time": 1000.0 + step,
        "metrics": {name.replace("_", "/", 1): value for name, value in metrics.items()},
    }


def make_tracker(uri, project, name="full"):
    return MlflowTracker(uri, project, name, {"kedro.pipeline": name}, {"seed": "7"})


@pytest.fixture
def tracker(uri, tmp_path):
    return make_tracker(uri, tmp_path)


def stage_run(workspace, stage):
    config = {
        stage: {"lr": 1e-6, "adaptive_kl": True, "lora": None, "betas": [0.9, 0.95]},
        "model": {"path": "tiny"},
    }
    directory = workspace / "workspace" / stage / "f00d"
    (directory / "export").mkdir(parents=True)
    digests = {"prompts": "d1", "sft_model": "d2"}
    return StageRun(stage, f"f00d{stage}", 7, config, {}, digests, directory, 60.0)


@pytest.fixture
def stage(tmp_path):
    return stage_run(tmp_path, "ppo")


def all_runs(client):
    """All runs, oldest first."""
    return client.search_runs([experiment_id(client)], order_by=["attributes.start_time ASC"])


@pytest.fixture
def runs(client):
    """The runs of stages, oldest first."""
    return lambda: [run for run in all_runs(client) if "rlhf.stage" in run.data.tags]


@pytest.fixture
def parents(client):
    return lambda: [run for run in all_runs(client) if "rlhf.stage" not in run.data.tags]


def history(client, run, name):
    """(step, milliseconds, value) of every logged point."""
    points = client.get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.timestamp, point.value) for point in points)


def write_metrics(stage, *records):
    stage.metrics_file.write_text("".join(json.dumps(item) + "\n" for item in records))


def report(tracker, stage, records, *, later=False):
    """The stage writes further records; the tracker looks at its directory, at once or later."""
    with stage.metrics_file.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in records)
    tracker.stage_metrics(stage, records)
    tracker.stage_phase(stage, None) if later else tracker.reconcile()


def finish(tracker, stage, metrics, **files):
    """The stage exports files, and ends."""
    for name, content in files.items():
        (stage.export / f"{name}.json").write_text(json.dumps(content))
    entries = file_entries(stage.export)
    made = Manifest(stage.stage, stage.fingerprint, 7, stage.config, {}, {}, metrics, entries)
    made.write(stage.export)
    tracker.stage_ended(stage, "FINISHED", metrics)


def reuse(uri, project, stage, metrics):
    """Another pipeline run reuses the stage; returns its tracker."""
    tracker, reused = make_tracker(uri, project, "again"), replace(stage, cached=True)
    tracker.stage_started(reused)
    tracker.stage_ended(reused, "FINISHED", metrics)
    return tracker


def warnings(caplog):
    return [line.getMessage() for line in caplog.records if line.name.startswith("rlhf_pipeline")]


def refuse(*arguments, **options):
    raise MlflowException("the store is down\nand a second line")


def test_a_finished_stage_is_one_child_run(tracker, stage, client, runs, parents):
    listeners = StageListener(tracker)
    listeners.stage_started(stage)
    second = record(2, objective_kl=0.75, policy_loss=0.25)
    report(tracker, stage, [record(1, objective_kl=0.5), second])
    report(tracker, stage, [record(3, objective_kl=1.0)])
    listeners.stage_ended(stage, "FINISHED", {"result/score": 2.5, "objective/kl": 1.0})
    tracker.end("FINISHED", "The verdict.")

    (parent,), (child,) = parents(), runs()
    assert (parent.info.run_name, parent.info.status) == ("full", "FINISHED")
    assert parent.data.tags["kedro.pipeline"] == "full"
    assert parent.data.tags["mlflow.note.content"] == "The verdict."
    assert parent.data.params == {"seed": "7"}
    assert (child.info.run_name, child.info.status) == ("ppo f00d", "FINISHED")
    assert child.data.tags == {
        "mlflow.parentRunId": parent.info.run_id,
        "mlflow.runName": "ppo f00d",
        "rlhf.stage": "ppo",
        "rlhf.driver": this_process(),
        "rlhf.fingerprint": "f00dppo",
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
    # The result belongs to the last step.
    assert history(client, child, "result/score") == [(3, 1_003_000, 2.5)]


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
def test_an_unsuccessful_stage_has_its_real_status(
    tracker, stage, client, runs, parents, status, monkeypatch
):
    """Also if the environment names a run, as inside a job of MLflow."""
    stranger = client.create_run(client.create_experiment("other"))
    monkeypatch.setenv("MLFLOW_RUN_ID", stranger.info.run_id)
    (stage.export / "report.json").write_text("{}")
    tracker.stage_started(stage)
    assert runs()[0].info.status == "RUNNING"
    tracker.stage_ended(stage, status, {})
    tracker.end(status)
    assert runs()[0].info.status == parents()[0].info.status == status
    assert client.list_artifacts(runs()[0].info.run_id) == []
    tracker.stage_started(replace(stage, fingerprint="beef"))  # another recipe has another run
    assert [run.data.tags["rlhf.fingerprint"] for run in runs()] == ["f00dppo", "beef"]
    assert client.get_run(stranger.info.run_id).info.status == "RUNNING"


def test_records_are_sent_every_few_seconds_and_at_the_end(
    tracker, stage, client, runs, monkeypatch
):
    """Five steps a second: MLflow gets them together, and metrics.jsonl has them at once."""
    now = 1000.0
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    tracker.stage_started(stage)
    sent = []
    for step in range(1, 111):
        now = 1000 + step / 5
        report(tracker, stage, [record(step, loss=1.0)], later=True)
        sent.append(len(history(client, runs()[0], "loss")))
    assert sorted({*sent}) == [0, 51, 102]  # after 10 seconds and one look
    tracker.stage_ended(stage, "FAILED", {})
    assert len(history(client, runs()[0], "loss")) == 110


@pytest.mark.parametrize("status", ["FAILED", None])
def test_an_unfinished_run_is_resumed_without_a_step_twice(
    tracker, stage, uri, tmp_path, client, runs, status, monkeypatch
):
    """Nor is the history of a metric read, which may have a point for each step of months."""
    tracker.stage_started(stage)
    report(tracker, stage, [record(1, objective_kl=0.5), record(2, objective_kl=0.75)])
    if status is not None:  # None: the driver was killed, and MLflow says RUNNING
        tracker.stage_ended(stage, status, {})
    (before,) = runs()

    whole = SqlAlchemyStore.get_metric_history
    monkeypatch.setattr(SqlAlchemyStore, "get_metric_history", refuse)
    again = make_tracker(uri, tmp_path, "ppo")
    # MLflow refuses to change ppo.lora: the first attempt's value stays.
    config = {**stage.config, "log": {"interval": 5}, "ppo": {**stage.config["ppo"], "lora": 4}}
    stage = replace(stage, config=config)
    again.stage_started(stage)
    assert runs()[0].info.status == "RUNNING"
    write_metrics(stage, record(1, objective_kl=0.5))
    resumed = [{**record(step, objective_kl=0.75), "time": 5000.0 + step} for step in (2, 3)]
    report(again, stage, resumed)
    again.stage_ended(stage, "FINISHED", {})
    monkeypatch.setattr(SqlAlchemyStore, "get_metric_history", whole)

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


def test_the_list_of_runs_shows_the_verdict(tracker, uri, tmp_path, client, runs, parents):
    stage = stage_run(tmp_path, "evaluate")
    for number, run in enumerate((stage, replace(stage, cached=True))):
        tracker = make_tracker(uri, tmp_path, str(number))
        tracker.stage_started(run)
        finish(tracker, run, {"win_rate/gold": 0.61}, evaluation=EVALUATION)
    champion = stage_run(tmp_path, "evaluate_champion")  # for the gate
    tracker.stage_started(champion)
    finish(tracker, champion, {}, evaluation=EVALUATION | {"judge": "score"})
    assert len(parents()) == 2
    assert "rlhf.verdict" not in runs()[1].data.tags
    for run in (*parents(), runs()[0]):
        assert run.data.tags["rlhf.verdict"] == "By the gold judge, PPO is better."
        columns = {name: run.data.metrics[name] for name in ("eval/win_rate", "eval/score")}
        assert columns == {"eval/win_rate": 0.61, "eval/score": 1.5}
        assert [value for _, _, value in history(client, run, "eval/win_rate")] == [0.61]


def test_a_reused_stage_is_linked_to_the_run_that_trained_it(
    tracker, stage, uri, tmp_path, client, runs, parents, caplog
):
    tracker.stage_started(stage)
    tracker.stage_ended(stage, "FINISHED", {})
    tracker.end("FINISHED")

    again = reuse(uri, tmp_path, stage, {"result/score": 1.0})
    again.log_page(stage.fingerprint, "<p>of this run")
    again.end("FINISHED")
    make_tracker(uri, tmp_path).log_page(stage.fingerprint, "<p>of an earlier run")
    make_tracker(uri, tmp_path).log_page("of no run", "<p>")
    (trained,) = runs()
    assert parents()[1].data.tags["rlhf.cached.ppo"] == trained.info.run_id
    assert "result/score" not in trained.data.metrics
    path = client.download_artifacts(trained.info.run_id, "evaluation.html")
    assert Path(path).read_text() == "<p>of an earlier run"
    assert warnings(caplog) == []


def test_a_reused_stage_that_the_store_lacks_is_sent_from_disk(
    tracker, stage, client, runs, parents
):
    write_metrics(stage, record(1, objective_kl=0.5), record(2, objective_kl=0.75))
    with stage.metrics_file.open("a") as file:
        file.write('{"step": 3, "tot')  # a killed attempt left half a line
    cached = replace(stage, cached=True)
    tracker.stage_started(cached)
    finish(tracker, cached, {"result/score": 2.5})

    (child,) = runs()
    assert child.info.status == "FINISHED"
    # When it was trained, not today.
    assert (child.info.start_time, child.info.end_time) == (1_001_000, 1_002_000)
    assert child.data.tags["mlflow.parentRunId"] == parents()[0].info.run_id
    assert child.data.params["ppo.lr"] == "1e-06"
    assert history(client, child, "objective/kl") == [(1, 1_001_000, 0.5), (2, 1_002_000, 0.75)]
    assert history(client, child, "result/score") == [(2, 1_002_000, 2.5)]


def with_answers(step, text="b", **changes):
    answer = {"step": step, "prompt": "User: Why?", "answer": text, "score": 0.5, "kl": step / 4}
    return record(step, objective_kl=step / 2) | {"answers": [answer]} | changes


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


def snapshot(client):
    """What MLflow has of each run, by name, without what differs from run to run."""
    found = {}
    for run in all_runs(client):
        tags = run.data.tags
        refers = [tag for tag in tags if tag == "mlflow.parentRunId" or "cached" in tag]
        named = {tag: client.get_run(tags[tag]).info.run_name for tag in refers}
        run_id = run.info.run_id
        artifacts = {file.path: file.file_size for file in client.list_artifacts(run_id)}
        curves = {name: history(client, run, name) for name in run.data.metrics}
        status, params = run.info.status, run.data.params
        found[run.info.run_name] = status, params, tags | named, curves, artifacts
    return found


def two_pipeline_runs(uri, project, mend):
    """Stages that finish, fail, resume and are reused; `mend` is called before the last reconcile.

    The work directories are those of an earlier call, if there was one.
    """
    shutil.rmtree(project / "workspace", ignore_errors=True)
    sft, ppo = stage_run(project, "sft"), stage_run(project, "ppo")
    ppo = replace(ppo, headline_metrics=("x",))
    first = make_tracker(uri, project, "first")
    first.stage_started(sft)
    for step in range(1, 6):
        report(first, sft, [with_answers(step)])
    finish(first, sft, {"result": 2.0}, report={})
    first.stage_started(ppo)
    report(first, ppo, [with_answers(step) for step in range(1, 5)])
    first.stage_ended(ppo, "FAILED", {})
    first.end("FAILED", "out of memory")
    second = reuse(uri, project, sft, {"result": 2.0})
    write_metrics(ppo, *map(with_answers, (1, 2)))  # it resumes from its checkpoint
    second.stage_started(ppo)
    for step in range(3, 8):
        report(second, ppo, [with_answers(step)])
    finish(second, ppo, {"step": 6, "x": 2.0}, report={}, evaluation=EVALUATION)
    second.log_page(ppo.fingerprint, "<p>page")
    second.end("FINISHED", "The verdict.")
    mend()
    first.reconcile()
    second.reconcile()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_one_reconcile_gives_the_same_runs_as_no_failure(
    seed, empty_database, tmp_path, monkeypatch
):
    """Requests are refused or their answers are lost, by chance."""
    chance, share = random.Random(seed), 0.0

    def unreliable(method):
        def call(*arguments, **options):
            fate = chance.random()
            if fate < share:
                raise MlflowException("refused")
            result = method(*arguments, **options)
            if fate < 1.5 * share:
                raise MlflowException("the answer is lost")
            return result

        return call

    for owner, names in (
        (SqlAlchemyStore, "create_run log_batch set_tag get_run get_metric_history"),
        (SqlAlchemyStore, "update_run_info search_runs"),
        (MlflowClient, "log_artifact log_text"),
    ):
        for name in names.split():
            monkeypatch.setattr(owner, name, unreliable(getattr(owner, name)))

    def mend():
        nonlocal share
        share = 0.0

    found = []
    for share in (0.0, 0.2):
        database = shutil.copy(empty_database, tmp_path / f"{share}.db")
        two_pipeline_runs(f"sqlite:///{database}", tmp_path, mend)
        found.append(snapshot(MlflowClient(f"sqlite:///{database}")))
    whole, mended = found
    assert mended == whole
    assert [run[0] for run in whole.values()] == ["FAILED", "FINISHED", "FINISHED", "FINISHED"]
    assert [[*run[4]] for run in whole.values()][1:3] == [
        ["answers.json", "report.json"],
        ["answers.json", "evaluation.html", "report.json"],
    ]


def test_an_outage_costs_one_warning_and_ends_with_one(tracker, stage, monkeypatch, caplog):
    tracker.stage_started(stage)
    with monkeypatch.context() as outage:
        outage.setattr(MlflowClient, "log_batch", refuse)
        report(tracker, stage, [record(2, objective_kl=0.75)])
        report(tracker, stage, [record(3, objective_kl=1.0)])
    tracker.stage_ended(stage, "FINISHED", {"result/score": 2.5})
    address = f"MLflow at {tracker._uri}"
    assert warnings(caplog) == [
        f"{address} does not record ppo (MlflowException: the store is down); "
        "training continues, metrics.jsonl has every number, and missing records are sent when the "
        "store answers again, at the latest by the next `kedro run` of the same stages",
        f"{address} answers again; missing records were sent",
    ]


def test_an_unreachable_store_does_not_harm_a_stage(stage, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    # Nothing listens on the discard port.
    tracker = make_tracker("http://user:secret@127.0.0.1:9", tmp_path)
    tracker.stage_started(stage)
    report(tracker, stage, [record(1, objective_kl=0.5)])
    tracker.stage_ended(stage, "FAILED", {})
    tracker.end("FAILED")
    assert [message.partition(" (")[0] for message in warnings(caplog)] == [
        "MLflow at http://...@127.0.0.1:9 does not record the pipeline run"
    ]
    assert "secret" not in caplog.text
    assert not (tmp_path / "mlartifacts").exists()  # no run has an end that waits for the store


@pytest.mark.long
def test_a_silent_server_gets_one_request_for_each_stage(stage, tmp_path, monkeypatch):
    """Without retries, after the first three; it accepts connections and never answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        tracker = make_tracker(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path)
        tracker.reconcile()
        tracker.stage_started(stage)
        for step in range(1, 9):
            tracker.stage_metrics(stage, [record(step)])
            tracker.stage_phase(stage, None)
        tracker.stage_ended(stage, "FINISHED", {})
        listener.setblocking(False)
        asked = 0
        while True:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                break
            asked += 1
    assert asked == 5


def test_requests_take_seconds_unless_the_environment_says_otherwise(monkeypatch):
    names = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def inside(**how):
        with request_limits(**how):
            return [os.environ.get(name) for name in names]

    assert inside() == ["2", "10"]
    assert inside(after_failure=True) == ["0", "3"]
    assert inside(uploads=True) == ["2", None]
    monkeypatch.setenv(names[1], "77")
    assert inside(after_failure=True) == ["0", "77"]
    assert [os.environ.get(name) for name in names] == [None, "77"]


def test_an_interruption_in_a_database_call_is_not_swallowed(tracker, stage, monkeypatch):
    tracker.stage_started(stage)

    def interrupted(*args, **kwargs):
        raise Interrupted("ended by SIGTERM")

    inside_a_transaction = "_update_latest_metrics_if_necessary"
    monkeypatch.setattr(SqlAlchemyStore, inside_a_transaction, interrupted)
    with pytest.raises(Interrupted, match="SIGTERM"):
        report(tracker, stage, [record(1, objective_kl=0.5)])


def test_artifacts_that_cannot_be_stored_hold_nothing_else_back(
    uri, stage, client, tmp_path, runs, parents, monkeypatch, caplog
):
    elsewhere = tmp_path / "elsewhere"
    client.create_experiment(EXPERIMENT, str(elsewhere / "artifacts"))
    tracker, other = make_tracker(uri, tmp_path), stage_run(tmp_path, "sft")
    tracker.stage_started(stage)
    elsewhere.write_text("no folder")
    report(tracker, stage, [with_answers(1)])
    finish(tracker, stage, {"result": 2.0}, report={})
    further = [stage_run(tmp_path, f"stage{number}") for number in range(7)]
    for each in (other, *further):
        tracker.stage_started(each)
    tracker.stage_ended(other, "KILLED", {})
    for each in further:
        finish(tracker, each, {"result": 2.0}, report={})
    tracker.end("FINISHED")  # which tries every stage, however many artifacts fail
    statuses = [run.info.status for run in (*parents(), *runs())]
    assert statuses == ["FINISHED", "FINISHED", "KILLED", *["FINISHED"] * 7]
    ended = runs()[0].info.end_time
    (warning,) = warnings(caplog)
    assert "does not record ppo (NotADirectoryError: " in warning

    elsewhere.unlink()
    reuse(uri, tmp_path, stage, {"result": 2.0})
    first, *_ = runs()
    names = [file.path for file in client.list_artifacts(first.info.run_id)]
    assert names == ["answers.json", "report.json"]
    assert first.info.end_time == ended  # it was not opened again

    for name in ("log_artifact", "log_text"):
        monkeypatch.setattr(MlflowClient, name, refuse)
    reuse(uri, tmp_path, stage, {"result": 2.0})
    assert len(warnings(caplog)) == 1  # nothing is sent twice


DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_mirror import *
uri, folder, orders = sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
tracker, sft = make_tracker(uri, folder), stage_run(folder, "sft")
tracker.stage_started(sft)
report(tracker, sft, [record(1, loss=1.0)])
print("at work", flush=True)
if orders:
    sys.stdin.readline()
    tracker.stage_ended(sft, orders[0], {})
    tracker.end(orders[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def driver(uri, folder, *orders):
    """The tracking of another `kedro run`, which ends by SIGKILL."""
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), uri, str(folder), *orders]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert process.stdout.readline() == "at work\n"
    return process


def test_runs_of_a_killed_driver_are_closed_and_its_stage_resumes_in_the_same_run(
    uri, client, tmp_path, runs, parents
):
    driver(uri, tmp_path).wait()
    (sft,) = runs()
    assert {run.info.status for run in (sft, *parents())} == {"RUNNING"}
    again = make_tracker(uri, tmp_path)
    again.reconcile()
    assert [run.info.status for run in (*runs(), *parents())] == ["KILLED", "KILLED", "RUNNING"]

    shutil.rmtree(tmp_path / "workspace")
    stage = stage_run(tmp_path, "sft")
    again.stage_started(stage)
    (resumed,) = runs()
    assert (resumed.info.run_id, resumed.info.status) == (sft.info.run_id, "RUNNING")
    assert resumed.data.tags["rlhf.driver"] == this_process()  # in case it is killed, too


def test_the_run_of_a_living_driver_stays_open_and_an_end_that_was_not_sent_is_sent_by_the_next_one(
    disk, empty_database, tmp_path
):
    shutil.copy(empty_database, disk.path / "mlflow.db")
    uri = f"sqlite:///{disk.path}/mlflow.db"
    other = driver(uri, tmp_path, "FAILED")
    make_tracker(uri, tmp_path, "second").reconcile()
    client = connect(uri, tmp_path)
    assert [run.info.status for run in all_runs(client)] == ["RUNNING", "RUNNING", "RUNNING"]
    disk.leave(0)
    other.communicate("\n")
    disk.make_room()
    make_tracker(uri, tmp_path, "third").reconcile()
    found = {run.info.run_name: run.info.status for run in all_runs(client)}
    own, others = ("full", "sft f00d"), ("second", "third")
    assert found == dict.fromkeys(own, "FAILED") | dict.fromkeys(others, "RUNNING")


def test_names_and_values_of_parameters_fit_the_limits_of_mlflow():
    assert parameters({"source": {"my|data": "x" * 7000, "empty": {}}}, seed=3) == {
        "source.my_data": "x" * 5999 + "…",
        "source.empty": "{}",
        "seed": "3",
    }
    assert [truncate("four", 4), truncate("fives", 4)] == ["four", "fiv…"]
