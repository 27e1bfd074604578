"""Outages of real stores: servers down, killed or silent, databases on a full or read-only disk.

Training continues, missing records are sent later, and every run ends with its real status.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from ports import reserved_port

from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.stages.processes import this_process
from rlhf_pipeline.tracking import mirror
from rlhf_pipeline.tracking.mirror import MlflowTracker
from rlhf_pipeline.tracking.store import EXPERIMENT, connect, experiment_id, request_limits

SOURCE = Path(mirror.__file__).parents[2]
TESTS = Path(__file__).parents[1]


def stage_run(workspace, stage, steps=0):
    """A stage whose program has written `steps` records; the loss equals the step."""
    run = StageRun(stage, stage * 8, 7, {stage: {"lr": 1.0}}, {}, {}, workspace / stage, 60.0)
    run.export.mkdir(parents=True, exist_ok=True)
    write(run, steps)
    return run


def write(run, steps):
    """Write records up to a step; return the new ones."""
    known = run.metrics_file.read_text().count("\n") if run.metrics_file.is_file() else 0
    new = [
        {
            "step": step,
            "total_steps": 9,
            "time": 1000.0 + step,
            "metrics": {"loss": float(step), "lr": 1.0},
            "answers": [{"step": step, "answer": f"Answer {step}"}],
        }
        for step in range(known + 1, steps + 1)
    ]
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in new)
    return new


def end(run):
    (run.export / "report.json").write_text("{}")
    Manifest(run.stage, run.fingerprint, 7, run.config, {}, {}, {"result": 2.0}, {}).write(
        run.export
    )


def started(uri, project):
    tracker = MlflowTracker(uri, project)
    tracker.describe("full", {})
    tracker.reconcile()
    return tracker


def found(client):
    """Status, by name, of every run; a parent is called full."""
    experiment = experiment_id(client)
    return {
        run.info.run_name.partition(" ")[0]: run
        for run in client.search_runs([experiment], order_by=["attributes.start_time DESC"])
    }


def statuses(client):
    return {name: run.info.status for name, run in found(client).items()}


def losses(client, stage):
    return [
        point.value for point in client.get_metric_history(found(client)[stage].info.run_id, "loss")
    ]


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr(mirror, "EVERY_S", 0.0)


def report(tracker, run, steps):
    """The program has written records up to a step, and the launcher has seen them."""
    tracker.stage_metrics(run, write(run, steps))
    tracker.stage_phase(run, None)


def warnings(caplog):
    return [line.getMessage() for line in caplog.records if line.name.startswith("rlhf_pipeline")]


class Server:
    """A real tracking server at one address that tests start and kill."""

    def __init__(self, folder: Path, database: str, port: int) -> None:
        self.port, self.folder, self.database = port, folder, database
        self.process: subprocess.Popen | None = None
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database]
        command += [
            "--artifacts-destination",
            str(self.folder / "served"),
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
        with (self.folder / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | quiet,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )
        while True:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=10):
                    return
            except OSError:
                time.sleep(0.1)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path, uri):
    with reserved_port() as port:  # also while the server is down
        server = Server(tmp_path, uri, port)
        yield server
        if server.process is not None and server.process.poll() is None:
            server.kill()


@pytest.fixture
def full_disk(disk, empty_database):
    """A store on a separate disk, which tests can fill."""
    shutil.copy(empty_database, disk.path / "mlflow.db")
    return disk, f"sqlite:///{disk.path}/mlflow.db"


@pytest.mark.long
def test_a_server_that_is_killed_during_a_stage_and_starts_again(
    server, client, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(mirror, "RETRY_S", 3600.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")  # a server that starts is slow
    server.start()
    tracker, sft, ppo = (
        started(server.uri, tmp_path),
        stage_run(tmp_path, "sft"),
        stage_run(tmp_path, "ppo"),
    )
    tracker.stage_started(sft)
    report(tracker, sft, 2)
    server.kill()
    for step in (3, 4, 5):
        report(tracker, sft, step)
    assert losses(client, "sft") == [1, 2]
    assert len(warnings(caplog)) == 1
    assert f"MLflow at {server.uri} does not record sft" in warnings(caplog)[0]

    server.start()
    report(tracker, sft, 6)
    assert losses(client, "sft") == [1, 2]  # the next attempt is later
    monkeypatch.setattr(mirror, "RETRY_S", 0.0)
    report(tracker, sft, 7)
    assert losses(client, "sft") == [1, 2, 3, 4, 5, 6, 7]
    assert warnings(caplog)[1:] == [f"MLflow at {server.uri} records again"]

    server.kill()
    tracker.stage_ended(sft, "FAILED", {})
    assert statuses(client)["sft"] == "RUNNING"
    server.start()
    tracker.stage_started(ppo)
    tracker.stage_ended(ppo, "FINISHED", {"result": 2.0})
    tracker.catch_up()
    tracker.end("FAILED")
    assert statuses(client) == {"full": "FAILED", "sft": "FAILED", "ppo": "FINISHED"}
    assert len(warnings(caplog)) == 4  # an outage and its end, twice


@contextmanager
def silent_server():
    """Accepts connections and never answers; yields its address and a function that counts them.

    The system accepts a connection before the request is sent, so the count is never late.
    """
    with socket.socket() as listener, ExitStack() as taken:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        listener.setblocking(False)
        asked = 0

        def connections():
            nonlocal asked
            with suppress(BlockingIOError):
                while True:
                    taken.enter_context(listener.accept()[0])
                    asked += 1
            return asked

        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections


@pytest.mark.long
def test_a_silent_server_gets_three_requests_and_then_one_for_each_stage(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with silent_server() as (uri, asked):
        tracker, sft = started(uri, tmp_path), stage_run(tmp_path, "sft")
        assert asked() == 3
        tracker.stage_started(sft)
        assert asked() == 4
        for step in range(1, 9):
            report(tracker, sft, step)
        assert asked() == 4
        tracker.stage_ended(sft, "FINISHED", {})
        assert asked() == 5
    assert len(warnings(caplog)) == 1


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


def test_a_stage_ends_although_its_artifacts_cannot_be_stored(
    uri, client, tmp_path, monkeypatch, caplog
):
    """They have a store of their own. It takes them again in the next run, once each."""
    elsewhere = tmp_path / "elsewhere"
    client.create_experiment(EXPERIMENT, str(elsewhere / "artifacts"))
    monkeypatch.setattr(mirror, "RETRY_S", 0.0)
    tracker, sft = started(uri, tmp_path), stage_run(tmp_path, "sft")
    tracker.stage_started(sft)
    report(tracker, sft, 1)
    elsewhere.rename(tmp_path / "away")
    elsewhere.write_text("no folder")
    report(tracker, sft, 3)
    end(sft)
    tracker.stage_ended(sft, "FINISHED", {"result": 2.0})
    assert losses(client, "sft") == [1, 2, 3]
    ended = found(client)["sft"].info
    tracker.catch_up()
    tracker.end("FINISHED")
    assert statuses(client) == {"full": "FINISHED", "sft": "FINISHED"}
    assert found(client)["sft"].info.end_time == ended.end_time  # it is not opened again
    (warning,) = warnings(caplog)
    assert "does not record sft (NotADirectoryError: " in warning

    elsewhere.unlink()
    (tmp_path / "away").rename(elsewhere)
    sent, log_artifact = [], MlflowClient.log_artifact

    def counted(self, run_id, path, *where):
        sent.append(Path(path).name)
        log_artifact(self, run_id, path, *where)

    monkeypatch.setattr(MlflowClient, "log_artifact", counted)
    for _ in range(2):
        again, reused = started(uri, tmp_path), replace(sft, cached=True)
        again.stage_started(reused)
        again.stage_ended(reused, "FINISHED", {"result": 2.0})
        again.end("FINISHED")
        assert sent == ["answers.json", "report.json"]
    assert len(client.load_table(experiment_id(client), "answers.json", [ended.run_id])) == 3


def test_a_database_on_a_full_disk(full_disk, tmp_path, monkeypatch, caplog):
    disk, uri = full_disk
    tracker, sft = started(uri, tmp_path), stage_run(tmp_path, "sft")
    tracker.stage_started(sft)
    report(tracker, sft, 1)
    disk.leave(0)
    for step in range(2, 200):  # the database has some free space inside
        report(tracker, sft, step)
    assert len(warnings(caplog)) == 1 and "disk is full" in warnings(caplog)[0]
    tracker.stage_ended(sft, "FINISHED", {"result": 2.0})
    disk.make_room()
    tracker.end("FINISHED")
    assert warnings(caplog)[1:] == [f"MLflow at {uri} records again"]
    client = connect(uri, tmp_path)
    assert statuses(client) == {"full": "FINISHED", "sft": "FINISHED"}
    assert losses(client, "sft") == list(range(1, 200))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_mlflow_has_in_the_end_what_the_directories_have(
    seed, uri, client, tmp_path, monkeypatch
):
    """Requests are refused or their answers are lost, by chance, in two runs of two stages."""
    chance, fails = random.Random(seed), True

    def unreliable(method):
        def call(*arguments, **options):
            fate = chance.random() if fails else 1.0
            if fate < 0.2:
                raise MlflowException("refused")
            result = method(*arguments, **options)
            if fate < 0.3:
                raise MlflowException("the answer is lost")
            return result

        return call

    for owner, names in (
        (SqlAlchemyStore, "create_run log_batch set_tag get_run get_metric_history"),
        (SqlAlchemyStore, "update_run_info search_runs"),
        (MlflowClient, "log_artifact log_dict log_text"),
    ):
        for name in names.split():
            monkeypatch.setattr(owner, name, unreliable(getattr(owner, name)))
    monkeypatch.setattr(mirror, "RETRY_S", 0.0)

    sft, ppo = stage_run(tmp_path, "sft"), stage_run(tmp_path, "ppo")
    first, second = MlflowTracker(uri, tmp_path), MlflowTracker(uri, tmp_path)
    first.stage_started(sft)
    for step in range(1, 6):
        report(first, sft, step)
    end(sft)
    first.stage_ended(sft, "FINISHED", {"result": 2.0})
    first.stage_started(ppo)
    report(first, ppo, 4)
    first.stage_ended(ppo, chance.choice(["FAILED", "KILLED"]), {})
    first.end("FAILED")

    reused = replace(sft, cached=True)
    second.stage_started(reused)
    second.stage_ended(reused, "FINISHED", {"result": 2.0})
    lines = ppo.metrics_file.read_text().splitlines(keepends=True)
    ppo.metrics_file.write_text("".join(lines[:2]))  # it resumes from its checkpoint
    second.stage_started(ppo)
    for step in range(3, 8):
        report(second, ppo, step)
    end(ppo)
    second.stage_ended(ppo, "FINISHED", {"result": 2.0})
    second.log_page(ppo.fingerprint, "<p>page")
    fails = False
    second.end("FINISHED")

    for stage, steps in ((sft, 5), (ppo, 7)):
        (run,) = client.search_runs([experiment_id(client)], f"tags.`rlhf.stage` = '{stage.stage}'")
        assert run.info.status == "FINISHED"
        assert run.data.params == {f"{stage.stage}.lr": "1.0", "seed": "7"}
        for metric, value in (("loss", None), ("lr", 1.0)):
            points = client.get_metric_history(run.info.run_id, metric)
            assert [(point.step, point.value) for point in points] == [
                (step, value or float(step)) for step in range(1, steps + 1)
            ]
        (result,) = client.get_metric_history(run.info.run_id, "result")
        assert (result.step, result.value) == (steps, 2.0)
        answers = client.load_table(experiment_id(client), "answers.json", [run.info.run_id])
        assert [*answers["step"]] == [*range(1, steps + 1)]
        artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
        pages = {"evaluation.html"} if stage is ppo else set()
        assert artifacts == {"answers.json", "report.json"} | pages


DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_outages import *
uri, folder, orders = sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
tracker, sft = started(uri, folder), stage_run(folder, "sft", steps=2)
tracker.stage_started(sft)
print("at work", flush=True)
if "wait" in orders:
    sys.stdin.readline()
if set(orders) & {"FAILED", "FINISHED"}:
    tracker.stage_ended(sft, orders[-1], {})
    tracker.end(orders[-1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def driver(uri, folder, *orders):
    """The tracking of another `kedro run`, which ends by SIGKILL."""
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), uri, str(folder), *orders]
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert process.stdout.readline() == "at work\n"
    return process


def test_runs_of_a_killed_driver_are_closed_and_its_stage_resumes_in_the_same_run(
    uri, client, tmp_path
):
    driver(uri, tmp_path).wait()
    before = found(client)
    assert {run.info.status for run in before.values()} == {"RUNNING"}

    again = started(uri, tmp_path)
    status = {
        run.info.run_id: run.info.status for run in client.search_runs([experiment_id(client)])
    }
    assert status.pop(before["full"].info.run_id) == "KILLED"
    assert status.pop(before["sft"].info.run_id) == "KILLED"
    assert list(status.values()) == ["RUNNING"]

    sft = stage_run(tmp_path, "sft", steps=3)
    again.stage_started(sft)
    assert statuses(client)["sft"] == "RUNNING"
    assert (
        found(client)["sft"].data.tags["rlhf.driver"] == this_process()
    )  # in case this driver is killed, too
    again.stage_ended(sft, "FINISHED", {})
    assert found(client)["sft"].info.run_id == before["sft"].info.run_id
    assert losses(client, "sft") == [1, 2, 3]


def test_runs_of_a_living_driver_stay_open(uri, client, tmp_path):
    other = driver(uri, tmp_path, "wait")
    started(uri, tmp_path)
    assert statuses(client) == {"full": "RUNNING", "sft": "RUNNING"}
    other.communicate("\n")
    started(uri, tmp_path)
    runs = client.search_runs([experiment_id(client)])
    assert sorted(run.info.status for run in runs) == ["KILLED", "KILLED", "RUNNING", "RUNNING"]


def test_an_end_that_the_store_did_not_get_is_sent_by_the_next_run(full_disk, tmp_path):
    disk, uri = full_disk
    other = driver(uri, tmp_path, "wait", "FAILED")
    disk.leave(0)
    other.communicate("\n")
    disk.make_room()
    client = connect(uri, tmp_path)
    assert statuses(client) == {"full": "RUNNING", "sft": "RUNNING"}
    before = found(client)
    started(uri, tmp_path)
    for name, run in before.items():
        assert (name, client.get_run(run.info.run_id).info.status) == (name, "FAILED")


def test_a_read_only_database(full_disk, tmp_path):
    disk, uri = full_disk
    disk.remount("ro")
    run = driver(uri, tmp_path, "FINISHED")
    _, said = run.communicate()
    assert (
        said.count("does not record") == 1
        and "OperationalError: attempt to write a readonly database" in said
    )

    disk.remount("rw")
    sft = stage_run(tmp_path, "sft")
    end(sft)
    again = started(uri, tmp_path)  # the next `kedro run`, which reuses the stage
    reused = StageRun(**{**vars(sft), "cached": True})
    again.stage_started(reused)
    again.stage_ended(reused, "FINISHED", {"result": 2.0})
    again.end("FINISHED")
    client = connect(uri, tmp_path)
    assert statuses(client) == {"full": "FINISHED", "sft": "FINISHED"}
    assert losses(client, "sft") == [1, 2]
    assert found(client)["sft"].data.metrics["result"] == 2.0
