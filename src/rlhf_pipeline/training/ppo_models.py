"""PPO's models in one record: four, or three where the advantage needs no critic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import uses_trained
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.ema import EMA
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.loading import assert_no_dropout, load_policy, load_scores, load_tokenizer
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.rollout.reward_sources import RewardSum, load_rewards
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.resume import Checkpoints


@dataclass(frozen=True)
class PPOModels:
    """Who takes part in PPO; no forward pass of any of them is random."""

    actor: DeepSpeedEngine
    """The policy in training."""
    reference: nn.Module
    """Its frozen start; an actor with LoRA is the same model, its adapters off."""
    critic: DeepSpeedEngine | None
    """The value model in training; None where `ppo.advantage` has none."""
    reward_model: nn.Module | None
    """The frozen judge; None where `ppo.rewards` does without it."""
    score_mean: float
    """What scores are centred by."""
    rewards: RewardSum | None
    """Makes the score of several sources, or of others than the reward model; None where that alone is the score."""
    contract: TokenContract
    """What all of them mean by a token."""
    tokenizer: PreTrainedTokenizerBase
    """What makes texts of their tokens."""
    ema: EMA | None = None
    """The average of the actor's weights; None where `ppo.ema` is off."""

    def __post_init__(self) -> None:
        for model in self.engines().values():
            assert_no_dropout(model)

    def engines(self) -> dict[str, nn.Module]:
        """The models by name; those that train or are sharded are DeepSpeed engines."""
        models = {
            "actor": self.actor,
            "reference": self.reference,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return {name: model for name, model in models.items() if model is not None}

    def deepspeed_settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration of each model that has an engine."""
        return {
            name: model.config
            for name, model in self.engines().items()
            if isinstance(model, DeepSpeedEngine)
        }

    def checkpoints(self, directory: Path, world: World, *, keep: int) -> Checkpoints:
        """What saves and restores the models that train."""
        trained = {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})
        averages = {} if self.ema is None else {"actor": self.ema.shards}
        return Checkpoints(directory, world, trained, averages, keep=keep)


def load_ppo_models(
    job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World
) -> PPOModels:
    """Actor and reference from the SFT model, critic and reward model from the reward model."""
    sft_model, reward_model = job.inputs["sft_model"], job.inputs["reward_model"]
    judge = None
    if uses_trained(config.rewards):
        judge = frozen_model(
            partial(load_scores, reward_model, trust_remote_code=job.trust_remote_code),
            config.reward_model,
            config.critic,
            world,
        )
    rewards = load_rewards(
        job, config, contract, world, None if judge is None else judge.score_mean
    )
    updates = config.ppo_epochs * config.updates_per_epoch
    actor_steps = config.steps - config.critic_warmup_steps
    load = partial(load_policy, sft_model, trust_remote_code=job.trust_remote_code)
    actor = train_engine(load, config.actor, actor_steps * updates)
    return PPOModels(
        actor=actor,
        reference=WithoutAdapters(actor)
        if config.actor.keeps_its_start
        else frozen_model(load, config.reference, config.actor, world),
        critic=None
        if config.critic is None
        else train_engine(
            partial(load_scores, reward_model, trust_remote_code=job.trust_remote_code),
            config.critic,
            config.steps * updates,
        ),
        reward_model=judge,
        score_mean=judge.score_mean
        if judge is not None and rewards is None
        else 0.0,  # the sum is centred already
        rewards=rewards,
        contract=contract,
        tokenizer=load_tokenizer(sft_model, trust_remote_code=job.trust_remote_code),
        ema=None if config.ema is None else EMA(actor, config.ema.decay),
    )
