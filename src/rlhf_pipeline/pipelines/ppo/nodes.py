"""The node that trains the policy by PPO."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.stages.external_inputs import reward_identities, reward_inputs
from rlhf_pipeline.stages.job import Job, Stages

from .spec import SPEC


def ppo(
    split: Path, sft_model: Path, reward_model: Path, config: PPOConfig, seed: int, stages: Stages
) -> Path:
    """Train the SFT model by PPO on the scores of `ppo.rewards`."""
    inputs = {"prompts": split / "ppo", "sft_model": sft_model, "reward_model": reward_model}
    inputs |= reward_inputs(config.rewards)
    if config.ptx is not None:
        inputs["pretraining"] = split / "pretraining"
    job = Job(SPEC, {"ppo": config}, inputs, seed, reward_identities(config.rewards))
    return stages.run(job)
