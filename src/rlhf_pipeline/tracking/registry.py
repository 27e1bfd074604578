"""What the model registry has: versions, their folders, and the present champion."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.errors import ArtifactError, StageError, without_secrets
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest, verify
from rlhf_pipeline.tracking.store import DIGEST_TAG, connect, request_limits, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

TOKENS = "token_contract.json"  # file of every model with the digest of its tokens


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
    try:
        with request_limits(uploads=uploads):
            yield connect(uri, project)
    except MlflowException as error:
        raise StageError(
            f"{store} does not return {what}: {without_secrets(str(error))}. Fix: repeat the "
            "command when the store answers"
        ) from None
