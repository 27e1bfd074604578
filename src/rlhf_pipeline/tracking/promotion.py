"""What a promotion reads from the registry: the present champion, and the tries on one test set."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.config.evaluate import CHAMPION, JUDGE_PREFIX, TASK_PREFIX
from rlhf_pipeline.errors import ArtifactError, StageError, without_secrets
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, verify
from rlhf_pipeline.tracking.store import DIGEST_TAG, connect, request_limits, tracking_uri
from rlhf_pipeline.tracking.versions import find_version, local_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRY_TAG = "rlhf.try."
"""Prefix of a tag with the number of a try, one for each test set."""

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

    with request_limits(uploads=True):
        try:
            client = connect(tracking_uri(project), project)
            version = find_version(client, model, CHAMPION)
        except MlflowException as error:
            raise StageError(
                f"MLflow did not return the champion of {model}: {without_secrets(str(error))}. "
                "Fix: repeat the `kedro run` when the store answers; it reuses finished stages"
            ) from None
        if version is None or version.tags.get(DIGEST_TAG) == content_digest(candidate):
            return None
        number = str(version.version)
        try:
            folder = local_folder(client, version, downloads)
            tokens = [verify(folder).files.get(TOKENS), Manifest.read(candidate).files.get(TOKENS)]
        except (ArtifactError, MlflowException, OSError) as error:  # OSError: also of requests
            return Champion(number, None, without_secrets(str(error)))
    if tokens[0] != tokens[1]:
        return Champion(number, None, f"{folder} has other tokens")
    return Champion(number, folder)


def champion_version(client: MlflowClient, model: str) -> str | None:
    """The number of the present champion."""
    version = client.get_registered_model(model).aliases.get(CHAMPION)
    return None if version is None else str(version)


def count_try(client: MlflowClient, model: str, version: str, test_set: str) -> int:
    """The number of a candidate among all that were tried on a test set; it keeps its number.

    The test set is the sources of its prompts: another seed, which selects other prompts of them,
    is one more chance for a policy that is no better.
    """
    tag = f"{TRY_TAG}{hashlib.sha256(test_set.encode()).hexdigest()[:16]}"
    found = client.search_model_versions(f"name = '{model}'")
    numbers = {str(other.version): int(other.tags[tag]) for other in found if tag in other.tags}
    if version not in numbers:
        numbers[version] = max(numbers.values(), default=0) + 1
        client.set_model_version_tag(model, version, tag, str(numbers[version]))
    return numbers[version]


def conditions(evaluation: Path) -> dict[str, Any]:
    """What two evaluations must share, so that their answers can be compared prompt by prompt."""
    manifest = Manifest.read(evaluation)
    judges = {
        name: digest
        for name, digest in manifest.inputs.items()
        if name in ("prompts", "reward_model") or name.startswith((JUDGE_PREFIX, TASK_PREFIX))
    }
    given = manifest.config["evaluate"]
    return {**judges, "seed": manifest.seed, "evaluate": json.dumps(given, sort_keys=True)}
