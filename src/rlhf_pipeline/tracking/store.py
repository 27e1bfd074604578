"""The MLflow store: its address, its experiment, the run of a recipe, and the ends of runs."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from rlhf_pipeline.errors import ConfigError, suggestion, without_secrets
from rlhf_pipeline.runtime.heartbeat import machine
from rlhf_pipeline.stages.job import Status
from rlhf_pipeline.stages.processes import may_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "rlhf-pipeline"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's pages then begin with runs and models instead of traces and prompts."""
FINGERPRINT_TAG = "rlhf.fingerprint"
DIGEST_TAG = "rlhf.content_digest"
DRIVER_TAG = "rlhf.driver"  # host, process namespace, process id and start time of the driver
STAGE_TAG = "rlhf.stage"
VERDICT_TAG = "rlhf.verdict"
VERDICT_COLUMNS = (f"tags.`{VERDICT_TAG}`", "metrics.`eval/win_rate`", "metrics.`eval/score`")
VIEW = "verdicts"
"""Name of the view of MLflow's list of runs that `kedro rlhf ui` opens."""
RUNS_VIEW = {
    "selectedColumns": VERDICT_COLUMNS,
    "columnOrder": VERDICT_COLUMNS,
    "columnWidths": {VERDICT_COLUMNS[0]: 340},
}
"""The view: verdict, win rate and reward in place of MLflow's source, models and data sets."""
ARTIFACTS = "mlartifacts"
UNSENT = "unsent_ends"  # folder with the ends of runs that the store has not received
SCHEMES = ("databricks", "file", "http", "https", "mssql", "mysql", "postgresql", "sqlite")


def tracking_uri(project: Path) -> str:
    """The store's address: MLFLOW_TRACKING_URI if set, else a SQLite database in the project.

    Raises ConfigError if neither MLflow nor a plugin of it has a store of such an address, or the
    database is none.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        _expect_database(database := project.resolve() / "mlflow.db")
        return f"sqlite:///{database}"
    scheme = uri.partition(":")[0].partition("+")[0] if ":" in uri else "file"
    known = sorted({*SCHEMES, *entry_points(group="mlflow.tracking_store").names})
    if scheme not in known:
        raise ConfigError(
            f"MLFLOW_TRACKING_URI: found {without_secrets(uri)!r}, expected an address that begins "
            f"with {', '.join(known)}{suggestion(scheme, known)}. Fix: correct or unset it"
        )
    if (named := _database(uri)) is not None:
        _expect_database(named)
    return uri


def _expect_database(file: Path) -> None:
    """Raise ConfigError if a file is damaged; MLflow would begin to write into an empty one."""
    if not file.is_file():
        return
    with file.open("rb") as opened:
        is_database = opened.read(16) == b"SQLite format 3\0"
    if not is_database:
        raise ConfigError(
            f"{file}: found {file.stat().st_size} bytes that are no SQLite database, expected that "
            "of MLflow. Fix: restore it from a copy; if you have none, move it away: runs and "
            "champion are then gone, and the models stay"
        )


def is_server(uri: str) -> bool:
    """Whether the store is a tracking server, which cannot read the files of this machine."""
    return uri.startswith(("http://", "https://"))


def connect(uri: str, project: Path) -> MlflowClient:
    """Return a client of the store. The first client creates a SQLite database.

    The tables are made in a file of another name, so that a kill leaves no half of a database.
    """
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # they log every migration of a new database
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the tracker says it once
    database = _database(uri)
    if database is None:
        return MlflowClient(uri)
    artifacts = project / ARTIFACTS
    artifacts.mkdir(parents=True, exist_ok=True)
    # MLflow's migrations fail if two processes run them on one empty database.
    with FileLock(artifacts / ".lock"):
        if not database.exists():
            for leftover in database.parent.glob(f"{database.name}.new*"):
                leftover.unlink()
            MlflowClient(f"sqlite:///{database}.new")
            database.with_name(f"{database.name}.new").rename(database)
        client = MlflowClient(uri)
        _follow(database, in_project=database.parent == project.resolve())
        return client


def _follow(database: Path, *, in_project: bool) -> None:
    """Let MLflow write beside the database after both were moved: it stores absolute paths.
    Experiments of others stay. So does a folder that exists, but not for the database in a project,
    which may be a copy: it would write into the original.
    """
    new = str(database.parent / ARTIFACTS)
    with closing(sqlite3.connect(database, timeout=60)) as store, store:
        find = "SELECT experiment_id, artifact_location FROM experiments WHERE name = ?"
        for own, old in store.execute(find, (EXPERIMENT,)).fetchall():
            was_beside = old.startswith("/") and Path(old).name == ARTIFACTS
            if was_beside and old != new and (in_project or not os.access(old, os.F_OK)):
                change = "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?"
                store.execute(change, (new, own))
                change = "UPDATE runs SET artifact_uri = replace(artifact_uri, ?, ?)"
                store.execute(f"{change} WHERE experiment_id = ?", (f"{old}/", f"{new}/", own))


def _database(uri: str) -> Path | None:
    """The absolute file of a SQLite store; None for other stores."""
    if not uri.startswith("sqlite:"):
        return None
    from sqlalchemy import make_url

    name = make_url(uri).database
    return Path(name).resolve() if name else None


@contextmanager
def request_limits(*, after_failure: bool = False, uploads: bool = False) -> Iterator[None]:
    """Limit the time that requests inside the block can take.

    MLflow's defaults block for minutes, during which no stage is supervised. Environment variables
    that the user has set take precedence. `after_failure` of the store, a refused connection takes
    no time and a silent server 3 seconds, instead of 6 and 35. With `uploads` of models, each
    request can take as long as MLflow allows.
    """
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0" if after_failure else "2"}
    limits |= {} if uploads else {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3" if after_failure else "10"}
    changed = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del os.environ[name]


def experiment_id(client: MlflowClient) -> str:
    """The id of the experiment, created if missing.

    With a SQLite store, artifacts are stored beside the database, not in the current folder.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        database = _database(client.tracking_uri)
        location = None if database is None else str(database.parent / ARTIFACTS)
        try:
            return str(client.create_experiment(EXPERIMENT, location, EXPERIMENT_TAGS))
        except MlflowException:
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:  # otherwise another process created it first
                raise
    return str(found.experiment_id)


def find_run(client: MlflowClient, fingerprint: str, *, finished: bool = True) -> str | None:
    """The id of the newest run of a recipe that finished, or did not finish; None without one."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        return None
    status = "=" if finished else "!="
    runs = client.search_runs(
        [found.experiment_id],
        f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}' and attributes.status {status} 'FINISHED'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    return runs[0].info.run_id if runs else None


def save_end(project: Path, run_id: str | None, status: Status) -> None:
    """Save how a run of this process ended, for the next driver; do nothing if the disk is full."""
    if run_id is None:  # the store has never had it
        return
    file = project / ARTIFACTS / UNSENT / run_id
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(status)


def close_orphans(client: MlflowClient, project: Path) -> None:
    """Close the runs of this host that MLflow calls RUNNING although their driver is gone.

    The driver was killed, or the store failed when a run ended: they are KILLED, or have the status
    that their driver saved.
    """
    running = f"tags.`{DRIVER_TAG}` LIKE '{machine()} %' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment_id(client)], running):
        if not may_run(run.data.tags[DRIVER_TAG], run.info.start_time / 1000):
            saved = project / ARTIFACTS / UNSENT / run.info.run_id
            is_saved = saved.is_file() and saved.stat().st_size > 0
            status = saved.read_text() if is_saved else "KILLED"
            ended = round(saved.stat().st_mtime * 1000) if is_saved else None
            client.set_terminated(run.info.run_id, status, ended)
            saved.unlink(missing_ok=True)
