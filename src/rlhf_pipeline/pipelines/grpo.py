from pathlib import Path

from rlhf_pipeline.config.grpo import GRPOConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.ppo import READS as READS
from rlhf_pipeline.pipelines.ppo import ppo, spec_of
from rlhf_pipeline.stages.job import Stages

SPEC = spec_of(GRPOConfig)


def grpo(
    split: Path,
    sft_model: Path,
    reward_model: Path,
    trained: RewardModelConfig | None,
    config: GRPOConfig | None,
    seed: int,
    stages: Stages,
) -> Path:
    """Train the SFT model by GRPO on the prompts of the phase `ppo`."""
    return ppo(split, sft_model, reward_model, trained, config, seed, stages)
