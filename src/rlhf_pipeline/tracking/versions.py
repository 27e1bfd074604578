"""Versions of the registered model, and their files on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.errors import ArtifactError, StageError, without_secrets
from rlhf_pipeline.runtime.manifest import verify
from rlhf_pipeline.tracking.store import DIGEST_TAG, connect, request_limits, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def find_version(client: MlflowClient, model: str, name: str) -> ModelVersion | None:
    """The version of a registered model with an alias or a number, or None."""
    if not client.search_registered_models(f"name = '{model}'"):
        return None
    number = client.get_registered_model(model).aliases.get(name, name)
    found = client.search_model_versions(f"name = '{model}'")
    return next((version for version in found if str(version.version) == str(number)), None)


def local_folder(client: MlflowClient, version: ModelVersion, downloads: Path) -> Path:
    """The folder of a version; that of a server is downloaded into a folder of `downloads` once."""
    if ":/" not in version.source:
        return Path(version.source)
    from mlflow.artifacts import download_artifacts

    name = version.tags.get(DIGEST_TAG) or f"{version.run_id}-{version.version}"
    folder = downloads / name[:48]
    if not folder.is_dir():
        downloads.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=downloads) as partial:
            uri = client.tracking_uri
            found = download_artifacts(version.source, dst_path=partial, tracking_uri=uri)
            verify(Path(found))  # a damaged download is not kept
            with suppress(OSError):  # another process was faster
                Path(found).rename(folder)
    return folder


def registered_folder(name: str, model: str, project: Path, downloads: Path) -> Path:
    """The folder of the version of a registered model with an alias or a number.

    Raises ArtifactError if the model has none of that name, and StageError if the store fails.
    """
    with _store(project, f"version {name} of {model}") as client:
        version = find_version(client, model, name)
        if version is not None:
            return local_folder(client, version, downloads)
        candidate = find_version(client, model, "candidate") if name == CHAMPION else None
    if candidate is not None:
        raise ArtifactError(
            f"no policy has been promoted yet, so {model} has no champion; candidate is version "
            f"{candidate.version}. Fix: name it, as in `kedro rlhf chat candidate`"
        )
    raise ArtifactError(
        f"found {name!r}, expected a version or an alias of {model}, or the folder of an artifact. "
        "Fix: `kedro rlhf ui` lists the versions"
    )


def registration(digest: str, model: str, project: Path) -> tuple[str, dict[str, str]] | None:
    """The newest version of a registered model with this content, and its tags.

    Raises StageError if the store fails.
    """
    with _store(project, f"the versions of {model}") as client:
        found = client.search_model_versions(
            f"name = '{model}' and tags.`{DIGEST_TAG}` = '{digest}'"
        )
        newest = max(found, key=lambda version: int(version.version), default=None)
        return None if newest is None else (str(newest.version), dict(newest.tags))


@contextmanager
def _store(project: Path, what: str) -> Iterator[MlflowClient]:
    """A client. Raises StageError if the store does not return `what`."""
    from mlflow.exceptions import MlflowException

    uri = tracking_uri(project)
    try:
        with request_limits(uploads=True):
            yield connect(uri, project)
    except MlflowException as error:
        raise StageError(
            f"MLflow at {without_secrets(uri)} does not return {what}: "
            f"{without_secrets(str(error))}. Fix: repeat the command when the store answers"
        ) from None
