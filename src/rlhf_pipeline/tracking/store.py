"""The MLflow store: its address, its experiment, runs, and the versions of registered models."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import TYPE_CHECKING

from filelock import FileLock

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError, suggestion, without_secrets
from rlhf_pipeline.runtime.heartbeat import machine
from rlhf_pipeline.runtime.imports import hidden
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest, verify
from rlhf_pipeline.stages.job import Status
from rlhf_pipeline.stages.processes import may_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

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
logger = logging.getLogger(__name__)

ARTIFACTS = "mlartifacts"
SILENT_S = 5.0
"""Seconds until a line says what the store has not returned."""
TOKENS = "token_contract.json"  # file of every model with the digest of its tokens
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


@hidden("pygments")  # the templates of migrations would load its lexers, for colours in HTML
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


@dataclass(frozen=True)
class Champion:
    """The present champion, which a candidate must beat."""

    version: str
    folder: Path | None  # its artifact; None: it cannot answer
    fault: str | None = None  # why it cannot answer


def find_champion(model: str, candidate: Path, project: Path, downloads: Path) -> Champion | None:
    """The champion of a registered model, if it is another policy than the candidate.

    Raises StageError if the store fails.
    """
    from mlflow.exceptions import MlflowException

    what = f"the champion of {model}"
    with registry(project, what) as client:
        version = find_version(client, model, CHAMPION)
    if version is None or version.tags.get(DIGEST_TAG) == content_digest(candidate):
        return None
    number = str(version.version)
    with registry(project, what, uploads=True) as client:
        try:
            folder = local_folder(client, version, downloads)
            tokens = [verify(folder).files.get(TOKENS), Manifest.read(candidate).files.get(TOKENS)]
        except (ArtifactError, MlflowException, OSError) as error:  # OSError: also of requests
            return Champion(number, None, without_secrets(str(error)))
    if tokens[0] != tokens[1]:
        return Champion(number, None, f"{folder} has other tokens")
    return Champion(number, folder)


def find_version(client: MlflowClient, model: str, name: str) -> ModelVersion | None:
    """The version of a registered model with an alias or a number, or None."""
    if not client.search_registered_models(f"name = '{model}'"):
        return None
    number = client.get_registered_model(model).aliases.get(name, name)
    found = client.search_model_versions(f"name = '{model}'")
    return next((version for version in found if str(version.version) == str(number)), None)


def local_folder(client: MlflowClient, version: ModelVersion, downloads: Path) -> Path:
    """The folder of a version; that of a server is downloaded into a folder of `downloads` once.

    If the project was moved or the folder removed, any artifact of the project with its content.
    Raises ArtifactError if there is none, it is damaged, or its content is not the registered one.
    """
    if ":/" not in version.source:
        folder = Path(version.source)
        if not folder.exists():
            folder = _same_content(version, root=downloads.parents[1])
        return _with_registered_content(folder, version)
    from mlflow.artifacts import download_artifacts

    # A digest, because everybody who can write to the store chooses the tag: it may be any path.
    name = f"{version.run_id}-{version.version}-{version.tags.get(DIGEST_TAG)}"
    folder = downloads / hashlib.sha256(name.encode()).hexdigest()[:48]
    if not folder.is_dir():
        downloads.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=downloads) as partial:
            uri = client.tracking_uri
            found = download_artifacts(version.source, dst_path=partial, tracking_uri=uri)
            verify(_with_registered_content(Path(found), version))  # another download is not kept
            with suppress(OSError):  # another process was faster
                Path(found).rename(folder)
    return _with_registered_content(folder, version)


def _same_content(version: ModelVersion, root: Path) -> Path:
    """A published artifact, or a result in the workspace, with the content of a version."""
    digest = version.tags.get(DIGEST_TAG)
    for manifest in sorted(root.glob(f"*/*/*/*/{NAME}")):
        with suppress(ArtifactError):  # another artifact
            if content_digest(manifest.parent) == digest:
                return manifest.parent
    raise ArtifactError(
        f"version {version.version} of {version.name}: found nothing in {version.source}, and no "
        f"artifact with its content {digest} below {root}, expected its model. Fix: put the model "
        "back from a copy; if it is lost, delete the version on the page of `kedro rlhf ui`"
    )


def _with_registered_content(folder: Path, version: ModelVersion) -> Path:
    """The folder; raise ArtifactError if its content is not the one that was registered."""
    Manifest.read(folder)  # without one, an artifact around the folder would count
    found = content_digest(folder)
    if (tag := version.tags.get(DIGEST_TAG, found)) != found:
        raise ArtifactError(
            f"version {version.version} of {version.name}: found content {found} in {folder}, "
            f"expected its tag {DIGEST_TAG}, {tag!r}. Fix: remove the folder or register it again"
        )
    return folder


def registered_folder(name: str, model: str, project: Path, downloads: Path) -> Path:
    """The folder of the version of a registered model with an alias or a number.

    Raises ArtifactError if the model has none of that name, and StageError if the store fails.
    """
    what = f"version {name} of {model}"
    with registry(project, what) as client:
        version = find_version(client, model, name)
        candidate = find_version(client, model, "candidate")
    if version is not None:
        with registry(project, what, uploads=True) as client:
            return local_folder(client, version, downloads)
    fix = "`kedro rlhf ui` lists the versions"
    if candidate is None:
        fix = f"nothing is registered as {model} yet; `kedro run` trains and registers a policy"
    elif name == CHAMPION:
        example = "`kedro rlhf chat candidate` or `kedro rlhf export candidate FOLDER`"
        fix = f"no policy has been promoted yet; write candidate, as in {example}"
    raise ArtifactError(
        f"found {name!r}, expected a version or an alias of {model}, or the folder of an artifact. "
        f"Fix: {fix}"
    )


def registration(digest: str, model: str, project: Path) -> tuple[str, dict[str, str]] | None:
    """The newest version with this content and its tags; StageError if the store fails."""
    with registry(project, f"the versions of {model}") as client:
        found = client.search_model_versions(
            f"name = '{model}' and tags.`{DIGEST_TAG}` = '{digest}'"
        )
        newest = max(found, key=lambda version: int(version.version), default=None)
        return None if newest is None else (str(newest.version), dict(newest.tags))


@contextmanager
def registry(project: Path, what: str, *, uploads: bool = False) -> Iterator[MlflowClient]:
    """A client for reading; with `uploads` of models, it waits long for each of them.

    Raises StageError if the store does not return `what`.
    """
    from mlflow.exceptions import MlflowException

    store = f"MLflow at {without_secrets(uri := tracking_uri(project))}"
    silent = Timer(SILENT_S, logger.warning, ["%s has not returned %s yet", store, what])
    silent.daemon = True
    silent.start()
    try:
        with request_limits(uploads=uploads):
            yield connect(uri, project)
    except MlflowException as error:
        raise StageError(
            f"{store} does not return {what}: {without_secrets(str(error))}. Fix: repeat the "
            "command when the store answers"
        ) from None
    finally:
        silent.cancel()
