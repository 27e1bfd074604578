"""What PPO's rewards add to its recipe: a changed function or another reward model trains PPO again, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.config.reward_files import source_file
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, RewardSource
from rlhf_pipeline.stages.manifest import artifact_of, folder_digest

PREFIX = "rewards."
"""Inputs of a job by the place of their source: rewards.0, rewards.1, ..."""


def reward_inputs(rewards: Sequence[RewardSource]) -> dict[str, Path]:
    """The functions' source files, and the reward models that this pipeline made."""
    inputs = {}
    for index, reward in enumerate(rewards):
        if isinstance(reward, CallableReward):
            inputs[f"{PREFIX}{index}"] = source_file(reward)
        elif isinstance(reward, ModelReward) and artifact_of(reward.folder) is not None:
            inputs[f"{PREFIX}{index}"] = reward.folder
    return inputs


def reward_identities(rewards: Sequence[RewardSource]) -> dict[str, str]:
    """Digests of the reward models that come from elsewhere."""
    return {
        f"{PREFIX}{index}": folder_digest(reward.folder)
        for index, reward in enumerate(rewards)
        if isinstance(reward, ModelReward) and artifact_of(reward.folder) is None
    }
