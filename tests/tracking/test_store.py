"""The store: its address, concurrent access to an empty database, and the run of a recipe."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlflow.artifacts
import pytest

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.tracking.store import (
    EXPERIMENT,
    connect,
    experiment_id,
    find_run,
    tracking_uri,
)

SOURCE = Path(__file__).parents[2] / "src"


def test_the_default_store_is_a_database_in_the_project(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert tracking_uri(Path("..")) == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_environment_can_set_another_store(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(tmp_path) == "http://tracking:5000"


def test_a_store_that_mlflow_does_not_have_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://me:canary@host/runs")
    assert tracking_uri(tmp_path).startswith("postgresql+psycopg2:")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgres://me:canary@host/runs")
    with pytest.raises(ConfigError, match="did you mean postgresql") as caught:
        tracking_uri(tmp_path)
    assert "canary" not in str(caught.value)


def test_artifacts_are_beside_the_database(client, tmp_path):
    identity = experiment_id(client)
    assert client.get_experiment(identity).artifact_location == f"{tmp_path}/mlartifacts"
    assert experiment_id(client) == identity


ENVIRONMENT = {
    "PYTHONPATH": str(SOURCE),
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
CONNECT = """
import os, signal, sys
from pathlib import Path
from rlhf_pipeline.tracking.store import *
project = Path(sys.argv[1])
uri = f'sqlite:///{project}/mlflow.db'
"""
KILL = """
from alembic.runtime.migration import HeadMaintainer
update, steps = HeadMaintainer.update_to_step, []
def killed(*arguments):
    steps.append(update(*arguments))
    if len(steps) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
HeadMaintainer.update_to_step = killed
connect(uri, project)
"""


@pytest.mark.slow
def test_processes_can_open_an_empty_database_at_once(tmp_path):
    program = f"{CONNECT}print(experiment_id(connect(uri, project)))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) for _ in range(2)]
    finished = [(process.communicate(timeout=600), process.returncode) for process in processes]
    assert [code for _, code in finished] == [0, 0], finished[0][0][1]
    assert [out for (out, _), _ in finished] == ["1\n", "1\n"]  # 0 is MLflow's "Default"


@pytest.mark.slow
def test_a_creation_that_was_killed_begins_again(tmp_path):
    """The kill comes between two of MLflow's migrations, which no later one can continue."""
    done = subprocess.run(
        [sys.executable, "-c", CONNECT + KILL, str(tmp_path)], env=ENVIRONMENT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} >= {"mlartifacts", "mlflow.db.new"}
    client = connect(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    assert experiment_id(client) == "1"
    assert {path.name for path in tmp_path.iterdir()} == {"mlartifacts", "mlflow.db"}


def test_find_run_takes_the_newest_finished_run_of_the_recipe(client):
    experiment = experiment_id(client)

    def run(fingerprint, status, start_time):
        made = client.create_run(
            experiment, start_time=start_time, tags={"rlhf.fingerprint": fingerprint}
        )
        client.set_terminated(made.info.run_id, status)
        return made.info.run_id

    run("aaaa", "FINISHED", 1)
    newest = run("aaaa", "FINISHED", 3)
    run("aaaa", "FINISHED", 2)
    killed = run("aaaa", "KILLED", 4)
    run("bbbb", "FINISHED", 5)
    assert find_run(client, "aaaa") == newest
    assert find_run(client, "aaaa", finished=False) == killed
    assert find_run(client, "bbbb", finished=False) is None
    assert find_run(client, "cccc") is None


def test_find_run_in_a_store_without_the_experiment_finds_nothing(client):
    assert find_run(client, "aaaa") is None


def test_a_store_that_was_moved_writes_beside_itself_and_reads_its_earlier_runs(
    empty_database, tmp_path
):
    """The paths that MLflow stores are absolute. It would make the earlier folders again."""
    old, new = tmp_path / "it's 100% #1", tmp_path / "new"
    old.mkdir()
    shutil.copy(empty_database, old / "mlflow.db")
    client = connect(f"sqlite:///{old}/mlflow.db", old)
    experiment = experiment_id(client)
    elsewhere = client.create_experiment("other", f"{old}-other/mlruns")
    # MLflow remembers in a process where the run of a first artifact is.
    run, other = (client.create_run(experiment).info.run_id for _ in range(2))
    client.log_text(run, "before", "page.txt")
    old.rename(new)
    client = connect(f"sqlite:///{new}/mlflow.db", new)
    assert experiment_id(client) == experiment
    assert (
        mlflow.artifacts.load_text(f"{client.get_run(run).info.artifact_uri}/page.txt") == "before"
    )
    for each in (other, client.create_run(experiment).info.run_id):
        client.log_text(each, "after", "page.txt")
        assert (new / "mlartifacts" / each / "artifacts" / "page.txt").read_text() == "after"
    assert not old.exists()
    assert client.get_experiment(elsewhere).artifact_location == f"{old}-other/mlruns"


def test_experiments_of_others_and_a_folder_that_exists_stay_where_they_are(uri, client, tmp_path):
    """A user's store can have artifacts on another disk, which may be out of reach for a while."""
    own, disk = tmp_path / "own" / "mlartifacts", tmp_path / "disk" / "mlartifacts"
    own.mkdir(parents=True)
    experiments = [
        client.create_experiment(EXPERIMENT, str(own)),
        client.create_experiment("theirs", str(disk)),
    ]
    runs = [client.create_run(experiment).info for experiment in experiments]
    (elsewhere := tmp_path / "project").mkdir()
    client = connect(uri, elsewhere)
    found = [client.get_experiment(experiment).artifact_location for experiment in experiments]
    assert found == [str(own), str(disk)]
    assert [client.get_run(run.run_id).info.artifact_uri for run in runs] == [
        run.artifact_uri for run in runs
    ]


def test_a_copied_project_writes_nothing_into_the_original(tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    connect(f"sqlite:///{original}/mlflow.db", original).create_experiment(
        EXPERIMENT, str(original / "mlartifacts")
    )
    shutil.copytree(original, copy)
    client = connect(f"sqlite:///{copy}/mlflow.db", copy)
    assert client.get_experiment_by_name(EXPERIMENT).artifact_location == str(copy / "mlartifacts")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 2 " * 9])
def test_a_damaged_database_is_named_and_not_made_anew(monkeypatch, tmp_path, content, named):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = tmp_path / ("runs.db" if named else "mlflow.db")
    if named:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"{file}: found {len(content)} bytes .* Fix: restore it"
    ):
        tracking_uri(tmp_path)
    assert file.read_bytes() == content
