"""Inputs that no stage makes, and how their content is identified: base models and rewards.

A changed file, another commit on the hub or a changed reward function changes the fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.config.base_model import BYTES, COMMIT, BaseModelConfig
from rlhf_pipeline.config.reward_files import source_file
from rlhf_pipeline.config.rewards import INPUT_PREFIX, CallableReward, ModelReward, RewardSource
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.hub import commit_of
from rlhf_pipeline.runtime.manifest import artifact_of, folder_digest


def base_model_identity(config: BaseModelConfig) -> dict[str, str]:
    """The commit of `revision` on the hub, or the digest of a local folder.

    Empty for a model that is built from `base_model.architecture`.

    Raises:
        ArtifactError: the hub cannot be reached, or has no such model.
    """
    if config.path is None:
        return {}
    if Path(config.path).is_dir():
        return {BYTES: folder_digest(Path(config.path))}
    try:
        return {COMMIT: commit_of("model", config.path, config.revision)}
    except LookupError as error:
        raise ArtifactError(
            f"base_model.path: {error}; no local folder has this name either. Fix: check the "
            "spelling and the network, or set base_model.revision to a commit that was downloaded "
            "before"
        ) from error


def reward_inputs(rewards: Sequence[RewardSource]) -> dict[str, Path]:
    """Source files of reward functions, and reward models made by this pipeline, by input name."""
    inputs = {}
    for index, reward in enumerate(rewards):
        if isinstance(reward, CallableReward):
            inputs[f"{INPUT_PREFIX}{index}"] = source_file(reward)
        elif isinstance(reward, ModelReward) and artifact_of(reward.folder) is not None:
            inputs[f"{INPUT_PREFIX}{index}"] = reward.folder
    return inputs


def reward_identities(rewards: Sequence[RewardSource]) -> dict[str, str]:
    """Digests of reward models made elsewhere, by input name."""
    return {
        f"{INPUT_PREFIX}{index}": folder_digest(reward.folder)
        for index, reward in enumerate(rewards)
        if isinstance(reward, ModelReward) and artifact_of(reward.folder) is None
    }
