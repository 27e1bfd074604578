"""The node that trains the policy by PPO."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.reward_inputs import reward_identities, reward_inputs
from rlhf_pipeline.stages.run import run_stage


def ppo(
    prepared_data: Path,
    sft_model: Path,
    reward_model: Path,
    config: PPOConfig,
    launch: LaunchConfig,
    seed: int,
    workspace: Path,
) -> Path:
    """Train the SFT model further by PPO on the score of `ppo.rewards`, in a DeepSpeed process."""
    inputs = {"prompts": prepared_data / "ppo", "sft_model": sft_model, "reward_model": reward_model}
    inputs |= reward_inputs(config.rewards)
    if config.ptx is not None:
        inputs["pretraining"] = prepared_data / "pretraining"
    job = Job("ppo", {"ppo": config}, inputs, seed, reward_identities(config.rewards))
    return run_stage(job, launch, workspace)
