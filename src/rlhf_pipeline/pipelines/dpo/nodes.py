"""The node that trains the policy by DPO."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.dpo import DPOConfig
from rlhf_pipeline.stages.job import Job, Stages

from .spec import SPEC


def dpo(split: Path, sft_model: Path, config: DPOConfig, seed: int, stages: Stages) -> Path:
    """Train the SFT model by DPO on the comparisons of the reward model."""
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(SPEC, {"dpo": config}, inputs, seed))
