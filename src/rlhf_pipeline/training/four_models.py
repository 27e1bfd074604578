"""PPO's models in one record: four, or three where the advantage needs no critic."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_policy, load_scores
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.models.token_contract import TokenContract
from rlhf_pipeline.stages.job import LaunchedJob
from rlhf_pipeline.training.engine import World, train_engine


@dataclass(frozen=True)
class FourModels:
    """Who takes part in PPO; no forward pass of any of them is random."""

    actor: DeepSpeedEngine
    """The policy in training."""
    reference: PreTrainedModel
    """Its frozen start."""
    critic: DeepSpeedEngine | None
    """The value model in training; None where `ppo.advantage` has none."""
    reward_model: TokenScores
    """The frozen judge."""
    contract: TokenContract
    """What all of them mean by a token."""

    def __post_init__(self) -> None:
        critic = [] if self.critic is None else [self.critic.module]
        for model in (self.actor.module, self.reference, self.reward_model, *critic):
            assert_no_dropout(model)


def load_four_models(job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World) -> FourModels:
    """Actor and reference from the SFT model, critic and reward model from the reward model."""
    sft_model, reward_model = job.inputs["sft_model"], job.inputs["reward_model"]
    updates = config.ppo_epochs * config.updates_per_epoch
    actor_steps = config.steps - config.critic_warmup_steps
    return FourModels(
        actor=train_engine(
            load_policy(sft_model, config.actor.deepspeed.precision), config.actor, actor_steps * updates
        ),
        reference=freeze(load_policy(sft_model, config.reference.precision)).to(world.device),
        critic=None
        if config.critic is None
        else train_engine(
            load_scores(reward_model, config.critic.deepspeed.precision), config.critic, config.steps * updates
        ),
        reward_model=freeze(load_scores(reward_model, config.reward_model.precision)).to(world.device),
        contract=contract,
    )
