"""The node that trains the reward model."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.stages.job import Job, Stages

from .spec import SPEC


def reward_model(
    split: Path, sft_model: Path, config: RewardModelConfig, seed: int, stages: Stages
) -> Path:
    """Train the SFT model with a scalar head on comparisons."""
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(SPEC, {"reward_model": config}, inputs, seed))
