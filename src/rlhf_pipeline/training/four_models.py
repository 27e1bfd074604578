"""PPO's models in one record: four, or three where the advantage needs no critic."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import uses_trained
from rlhf_pipeline.models.loading import assert_no_dropout, freeze, load_policy, load_scores
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.models.token_contract import TokenContract
from rlhf_pipeline.stages.job import LaunchedJob
from rlhf_pipeline.training.engine import World, train_engine
from rlhf_pipeline.training.rewards import RewardSum, load_rewards


@dataclass(frozen=True)
class FourModels:
    """Who takes part in PPO; no forward pass of any of them is random."""

    actor: DeepSpeedEngine
    """The policy in training."""
    reference: PreTrainedModel
    """Its frozen start."""
    critic: DeepSpeedEngine | None
    """The value model in training; None where `ppo.advantage` has none."""
    reward_model: TokenScores | None
    """The frozen judge; None where `ppo.rewards` does without it."""
    score_mean: float
    """What scores are centred by."""
    rewards: RewardSum | None
    """Makes the score of several sources, or of others than the reward model; None where that alone is the score."""
    contract: TokenContract
    """What all of them mean by a token."""

    def __post_init__(self) -> None:
        critic = [] if self.critic is None else [self.critic.module]
        judge = [] if self.reward_model is None else [self.reward_model]
        for model in (self.actor.module, self.reference, *judge, *critic):
            assert_no_dropout(model)


def load_four_models(job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World) -> FourModels:
    """Actor and reference from the SFT model, critic and reward model from the reward model."""
    sft_model, reward_model = job.inputs["sft_model"], job.inputs["reward_model"]
    judge = None
    if uses_trained(config.rewards):
        judge = freeze(load_scores(reward_model, config.reward_model.precision)).to(world.device)
    rewards = load_rewards(job, config, contract, world, None if judge is None else judge.score_mean)
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
        reward_model=judge,
        score_mean=judge.score_mean if judge is not None and rewards is None else 0.0,  # the sum is centred already
        rewards=rewards,
        contract=contract,
    )
