"""The node that trains the policy by DPO."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.dpo import DPOConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import run_stage


def dpo(
    prepared_data: Path, sft_model: Path, config: DPOConfig, launch: LaunchConfig, seed: int, workspace: Path
) -> Path:
    """Train the SFT model further by DPO on the reward model's comparisons, in a DeepSpeed process."""
    inputs = {"comparisons": prepared_data / "reward_model", "sft_model": sft_model}
    return run_stage(Job("dpo", {"dpo": config}, inputs, seed), launch, workspace)
