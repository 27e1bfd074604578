"""PPO's models in one record: four, or three if the advantage needs no critic."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import trained_weight
from rlhf_pipeline.config.training import FrozenModel, TrainedModel
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import load_rows
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import EMA
from rlhf_pipeline.models.loading import assert_no_dropout, load_policy, load_tokenizer
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.rollout.generation import Generator
from rlhf_pipeline.rollout.hybrid_generator import HybridGenerator
from rlhf_pipeline.rollout.reward_sources import RewardSum, load_rewards
from rlhf_pipeline.rollout.scoring import ScoringModels
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.resume import Checkpoints


@dataclass(frozen=True)
class PPOModels:
    """The models of PPO. No forward pass of any of them is random."""

    actor: DeepSpeedEngine
    """The policy in training."""
    reference: nn.Module
    """Its frozen start. With LoRA it is the actor with its adapters off."""
    critic: DeepSpeedEngine | None
    """The value model in training; None if `ppo.advantage` needs none."""
    reward_model: nn.Module | None
    """The trained reward model, frozen; None if `ppo.rewards` does not contain it."""
    rewards: RewardSum
    """The sources of `ppo.rewards`."""
    generator: Generator
    """Samples responses from the actor."""
    contract: TokenContract
    """The tokens that all models share."""
    tokenizer: PreTrainedTokenizerBase
    """Their tokenizer."""
    ema: EMA | None = None
    """The average of the actor's weights; None if `ppo.ema` is off."""

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

    def scorers(self, config: PPOConfig, world: World, *, with_critic: bool) -> ScoringModels:
        return ScoringModels(
            policy=self.actor,
            reference=self.reference,
            critic=self.critic if with_critic else None,
            reward_model=self.reward_model,
            contract=self.contract,
            world=world,
            temperature=config.sampling.temperature,
            micro_batch_tokens=config.micro_batch_tokens,
            entropy_trains=config.entropy_coef > 0,
        )

    def deepspeed_settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration of each model that has an engine."""
        return {
            name: model.config
            for name, model in self.engines().items()
            if isinstance(model, DeepSpeedEngine)
        }

    def checkpoints(self, directory: Path, world: World, *, keep: int) -> Checkpoints:
        trained = {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})
        averages = {} if self.ema is None else {"actor": self.ema.shards}
        return Checkpoints(directory, world, trained, averages, keep=keep)


def load_generator(
    actor: DeepSpeedEngine,
    contract: TokenContract,
    config: PPOConfig,
    world: World,
    job: LaunchedJob,
) -> Generator:
    """What samples from the actor, for the prompts of the job."""
    match config.generator:
        case "hybrid":
            return HybridGenerator(actor, contract, config.hybrid, world)
        case "vllm":
            from rlhf_pipeline.rollout.vllm_generator import VLLMGenerator

            files = [job.inputs["prompts"] / f"{part}.arrow" for part in ("train", "validation")]
            tables = [load_rows(file, world) for file in files]
            return VLLMGenerator(
                actor,
                contract,
                rows=config.sampling.batch_size_per_gpu,
                longest=max(table.longest("prompt_ids") for table in tables)
                + config.sampling.max_response_tokens,
            )
    return TransformersGenerator(actor, contract, gather=config.gather_for_generation)


def load_ppo_models(
    job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World
) -> PPOModels:
    """Load the models of `ppo` from the SFT model, those with a scalar head from the reward model.

    During the warm-up of the critic the actor does not train, so it makes fewer updates.
    """
    trust = job.trust_remote_code
    steps = {"actor": config.steps - config.critic_warmup_steps, "critic": config.steps}
    updates = config.ppo_epochs * config.updates_per_epoch

    def load(model: TrainedModel | FrozenModel) -> Any:
        source = load_scores if model.scalar else load_policy
        folder = job.inputs["reward_model" if model.scalar else "sft_model"]
        from_disk = partial(source, folder, trust_remote_code=trust)
        if isinstance(model, TrainedModel):
            return train_engine(from_disk, model.config, steps[model.name] * updates)
        return frozen_model(from_disk, model.config, world)

    models = {model.name: load(model) for model in config.models()}
    actor, critic, reward_model = models["actor"], models.get("critic"), models.get("reward_model")
    if critic is not None:
        critic.module.scale = trained_weight(config.rewards)
    tokenizer = load_tokenizer(job.inputs["sft_model"], trust_remote_code=trust)
    mean = None if reward_model is None else reward_model.score_mean
    return PPOModels(
        actor=actor,
        reference=models["reference"] if "reference" in models else WithoutAdapters(actor),
        critic=critic,
        reward_model=reward_model,
        rewards=load_rewards(job, config, contract, world, tokenizer=tokenizer, trained_mean=mean),
        generator=load_generator(actor, contract, config, world, job),
        contract=contract,
        tokenizer=tokenizer,
        ema=None if config.ema is None else EMA(actor, config.ema.decay),
    )
