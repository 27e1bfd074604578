from collections.abc import Mapping
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveInt

from rlhf_pipeline.config.distill import DistillConfig
from rlhf_pipeline.config.doors import ADVANTAGE
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.ppo_blocks import KLConfig
from rlhf_pipeline.config.training import OptimizerConfig, SamplingConfig, TrainedModelConfig


class GRPOConfig(PPOConfig):
    """Group relative policy optimization (Shao et al. 2024): the program of PPO without a critic.

    The learning rate, the KL and the single update of a batch are those of DeepSeekMath (section
    4.2), the 8 responses to each prompt those of TRL.
    """

    stage = sampler = "grpo"

    steps: PositiveInt = 500
    """Number of steps, each on `rollout_batches` * `rollout_batch_size` responses."""
    rollout_batch_size: PositiveInt = 64
    """Responses per generated batch, over all ranks: those to 8 prompts."""
    responses_per_prompt: PositiveInt = 8
    """Independent responses to each prompt; must divide `rollout_batch_size`."""
    minibatch_size: PositiveInt = 64
    """Responses per optimizer step, over all ranks; must divide the responses of a step."""
    micro_batch_tokens: PositiveInt = 2048
    """Largest number of tokens in a forward pass on each rank; a longer row has one of its own."""
    advantage: Annotated[str, ADVANTAGE] = "grpo"
    """Advantage estimator, as in `ppo.advantage`: any without a critic, or a function of yours."""
    sampling: SamplingConfig = SamplingConfig(max_response_tokens=256)
    """How responses are sampled."""
    kl: KLConfig = KLConfig(coef=0.04, place="loss")
    """KL constraint to the reference."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response that was cut."""
    actor: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    """The policy in training. It starts from the SFT model, or without SFT from the base model."""


POLICIES: Mapping[str, type[PPOConfig]] = {
    kind.stage: kind for kind in (PPOConfig, GRPOConfig, DistillConfig)
}
"""The blocks of the stages that run the program of PPO."""
