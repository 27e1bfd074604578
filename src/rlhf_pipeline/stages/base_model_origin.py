"""What a base model that is fetched adds to its recipe: another commit on the hub, or another byte in a folder, is another
model."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.model import BaseModelConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.hub import commit_of
from rlhf_pipeline.stages.manifest import folder_digest

COMMIT, BYTES = "commit", "bytes"


def model_origin(config: BaseModelConfig) -> dict[str, str]:
    """The commit that `revision` names on the hub, or the digest of a local folder; nothing for a model that is built.

    Raises:
        ArtifactError: the hub cannot be asked, or has no such model.
    """
    if config.path is None:
        return {}
    if Path(config.path).is_dir():
        return {BYTES: folder_digest(Path(config.path))}
    try:
        return {COMMIT: commit_of("model", config.path, config.revision)}
    except LookupError as error:
        raise ArtifactError(
            f"base_model.path: {error}. It is neither a local folder; check the spelling and the network, or set "
            "base_model.revision to a commit that was downloaded before"
        ) from error
