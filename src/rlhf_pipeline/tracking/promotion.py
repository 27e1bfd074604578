"""What a promotion reads from the registry: the present champion, and the tries on one test set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.config.evaluate import CHAMPION
from rlhf_pipeline.errors import ArtifactError, StageError, without_secrets
from rlhf_pipeline.evaluation.comparison import BASELINE
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, verify
from rlhf_pipeline.tracking.store import (
    DIGEST_TAG,
    FINGERPRINT_TAG,
    STAGE_TAG,
    TEST_SET_TAG,
    connect,
    request_limits,
    tracking_uri,
)
from rlhf_pipeline.tracking.versions import find_version, local_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

TOKENS = "token_contract.json"
"""File of every model with the digest of its tokens."""


@dataclass(frozen=True)
class Champion:
    """The present champion, which a candidate must beat."""

    version: str
    folder: Path | None
    """Its artifact. None: it cannot answer, see `fault`."""
    fault: str | None = None


def find_champion(model: str, candidate: Path, project: Path, downloads: Path) -> Champion | None:
    """The champion of a registered model, if it is another policy than the candidate.

    A server's champion is downloaded into a folder below `downloads`, once. Raises StageError if
    the store fails.
    """
    from mlflow.exceptions import MlflowException

    try:
        with request_limits(uploads=True):
            client = connect(tracking_uri(project), project)
            version = find_version(client, model, CHAMPION)
            if version is None or version.tags.get(DIGEST_TAG) == content_digest(candidate):
                return None
            folder = local_folder(client, version, downloads)
    except MlflowException as error:
        raise StageError(
            f"MLflow did not return the champion of {model}: {without_secrets(str(error))}. "
            "Fix: repeat the `kedro run` when the store answers; it reuses finished stages"
        ) from None
    fault = _fault(folder, candidate)
    return Champion(str(version.version), None if fault else folder, fault)


def tries(client: MlflowClient, model: str, version: str, test_set: str) -> int:
    """Candidates registered with a test set up to a version, that one included."""
    found = client.search_model_versions(
        f"name = '{model}' and tags.`{TEST_SET_TAG}` = '{test_set}'"
    )
    earlier = {
        other.tags[FINGERPRINT_TAG]
        for other in found
        if other.tags[STAGE_TAG] != BASELINE and int(other.version) < int(version)
    }
    own = client.get_model_version(model, version).tags[FINGERPRINT_TAG]
    return len(earlier - {own}) + 1


def test_set(evaluation: Path) -> str:
    """Identity of an evaluation's prompts: their file, how many, and the seed that drew them."""
    manifest = Manifest.read(evaluation)
    drawn = manifest.config["evaluate"]["prompts"], manifest.seed
    return "-".join(map(str, (manifest.inputs["prompts"][:16], *drawn)))


def _fault(folder: Path, candidate: Path) -> str | None:
    """Why a champion cannot answer the prompts of a candidate, or None."""
    try:
        theirs, ours = verify(folder), Manifest.read(candidate)
        if theirs.files.get(TOKENS) != ours.files.get(TOKENS):
            return f"version with other tokens in {folder}"
    except ArtifactError as error:
        return str(error)
    return None
