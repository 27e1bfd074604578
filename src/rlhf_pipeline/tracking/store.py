"""The MLflow store: where it is, how to connect to it, and how to find a run there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "rlhf-pipeline"
FINGERPRINT_TAG = "rlhf.fingerprint"
ARTIFACTS = "mlartifacts"


def tracking_uri(project: Path) -> str:
    """The store's address: MLFLOW_TRACKING_URI where it is set, else a SQLite database in the project's root.

    The path is absolute, so that commands started in any folder of the project share one store.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project.resolve()}/mlflow.db"


def is_server(uri: str) -> bool:
    """True for a tracking server: it cannot see this machine's files."""
    return uri.startswith(("http://", "https://"))


def connect(uri: str, project: Path) -> MlflowClient:
    """A client of the store; the first one creates the tables of an empty SQLite database."""
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # they announce every migration of a new database
        logging.getLogger(name).setLevel(logging.WARNING)
    if not uri.startswith("sqlite:"):
        return MlflowClient(uri)
    artifacts = project / ARTIFACTS
    artifacts.mkdir(parents=True, exist_ok=True)
    with FileLock(
        artifacts / ".lock"
    ):  # MLflow's migrations fail where two processes run them on one empty database
        return MlflowClient(uri)


@contextmanager
def patience(*, again: bool = False, uploads: bool = False) -> Iterator[None]:
    """Inside the block, give a server up that does not answer. MLflow's own patience is minutes, during which a stage goes
    unwatched; environment variables that are set decide instead.

    A server that refuses connections costs 6 seconds, one that is silent 35; with `again`, where it has failed just now,
    none, and 3. With `uploads` of checkpoints each answer may take as long as MLflow says.
    """
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0" if again else "2"}
    settings |= {} if uploads else {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3" if again else "10"}
    given = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment of that name, created where there is none.

    With a SQLite store its artifacts lie beside the database; MLflow's own default is the current folder.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy import make_url

    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    beside = None
    if client.tracking_uri.startswith("sqlite:"):
        beside = str(
            Path(make_url(client.tracking_uri).database or "").resolve().parent / ARTIFACTS
        )
    try:
        return str(client.create_experiment(name, artifact_location=beside))
    except MlflowException:
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)  # another process was faster


def find_run(
    client: MlflowClient, fingerprint: str, *, finished: bool = True, experiment: str = EXPERIMENT
) -> str | None:
    """The newest run of a recipe that finished, or with `finished=False` that did not; None where there is none."""
    found = client.get_experiment_by_name(experiment)
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
