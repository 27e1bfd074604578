"""What PPO works with: models, data, text of ptx, and the state that a checkpoint restores."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import trained_weight
from rlhf_pipeline.config.training import FrozenModel, TrainedModel
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.distributed.batches import Rows, load_rows
from rlhf_pipeline.distributed.engine import frozen_model, store_settings, train_engine, untrained
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import EMA, DeepSpeedEngine
from rlhf_pipeline.episodes.loop import Episodes, load_episodes
from rlhf_pipeline.generation.generator import Generator, load_generator
from rlhf_pipeline.models.loading import assert_no_dropout, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.scoring.reward_sources import Reading, RewardSum, load_rewards
from rlhf_pipeline.training.checkpoints import BestModels, Checkpoints
from rlhf_pipeline.training.prompts import TEXT_STREAM, FurtherRows, PromptStream
from rlhf_pipeline.training.step_log import DivergenceGuard, stability_advice

VALIDATION, VALIDATION_EMA = "validation", "validation_ema"
"""Prefixes of held-out metrics: of the actor, and of the average of its weights."""


@dataclass(frozen=True)
class PPOModels:
    """The models of PPO. No forward pass of any of them is random."""

    actor: DeepSpeedEngine  # the policy in training
    reference: nn.Module
    """Its frozen start, or a teacher. With LoRA the start is the actor with its adapters off."""
    critic: DeepSpeedEngine | None  # the value model in training, if `ppo.advantage` needs one
    reward_model: nn.Module | None  # the trained one, frozen, if `ppo.rewards` contains it
    rewards: RewardSum  # the sources of `ppo.rewards`
    generator: Generator  # samples responses from the actor
    contract: TokenContract  # the tokens that all models share
    tokenizer: PreTrainedTokenizerBase  # their tokenizer
    ema: EMA | None = None  # the average of the actor's weights; None if `ppo.ema` is off
    episodes: Episodes | None = None  # what plays answers of several turns

    def __post_init__(self) -> None:
        for model in self.engines().values():
            assert_no_dropout(model)

    def engines(self) -> dict[str, nn.Module]:
        """The models by name; those that train or are sharded are DeepSpeed engines."""
        names = ("actor", "reference", "critic", "reward_model")
        models = {name: getattr(self, name) for name in names}
        return {name: model for name, model in models.items() if model is not None}


@dataclass(frozen=True)
class Setup:
    """What PPO works with, from its first step or from the step after a checkpoint."""

    config: PPOConfig
    models: PPOModels
    prompts: Rows
    validation: Rows
    text: FurtherRows | None  # for `ppo.ptx`; None if it is off
    given: FurtherRows | None  # for `distill.given_batch_size`; None if it is 0
    world: World
    seed: int
    best: dict[str, BestModels]  # by prefix of the metrics: one for each policy of `policies`
    guard: DivergenceGuard
    checkpoints: Checkpoints
    done: int  # steps that an earlier attempt has taken
    kl_coef: float  # the KL coefficient of the next step
    stream: PromptStream  # the order of `prompts`
    answers: int  # held-out prompts whose answers each evaluation shows

    def save(self, step: int, *, due: bool, kl_coef: float) -> None:
        """Save a checkpoint if one is due or a signal came; then obey the signal."""
        best = {name: models.state() for name, models in self.best.items()}
        critic = self.models.critic
        loop = {"kl_coef": kl_coef, "best": best, "prompts": self.stream.state()}
        loop |= {} if critic is None else {"value_offset": critic.module.offset}
        if self.checkpoints.step_ended(step, due=due, loop=loop):
            for models in self.best.values():
                models.forget_the_rest()


def policies(models: PPOModels) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """The policies that are evaluated and may be exported, by the prefix of their metrics.

    In the context of a value, the actor has the weights of that policy.
    """
    found: dict[str, Callable[[], AbstractContextManager[object]]] = {VALIDATION: nullcontext}
    if models.ema is not None:
        found[VALIDATION_EMA] = models.ema.in_place
    return found


def set_up(job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World) -> Setup:
    """Load models and data; restore the checkpoint if resuming."""

    def rows(source: str, name: str = "train") -> Rows:
        return load_rows(job.inputs[source] / f"{name}.arrow", world)

    def further(source: str, size: int, stream: int) -> FurtherRows:
        return FurtherRows(rows(source), size, stream, config, world, job.seed)

    text = given = None
    if config.ptx is not None:
        text = further("pretraining", config.ptx.batch_size, TEXT_STREAM)
    if "demonstrations" in job.inputs:
        assert isinstance(config, DistillConfig)
        given = further("demonstrations", config.given_batch_size, TEXT_STREAM + 1)
    models = load_ppo_models(job, config, contract, world)
    store_settings(models.engines(), job)
    load = partial(load_policy, job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    best = {
        prefix: BestModels(
            job, world, models.tokenizer, config.actor, load, keep=config.keep_best,
            variant="ema" if prefix == VALIDATION_EMA else "",
        )
        for prefix in policies(models)
    }  # fmt: skip
    trained = {"actor": models.actor} | ({} if models.critic is None else {"critic": models.critic})
    averages = {} if models.ema is None else {"actor": models.ema.shards}
    frozen, keep = models.engines(), config.keep_last
    frozen |= {name: m for name, m in models.rewards.models.items() if m not in frozen.values()}
    checkpoints = Checkpoints(job.checkpoints, world, trained, averages, frozen, keep=keep)
    prompts, done = rows("prompts"), job.resume_from
    stream = PromptStream(prompts.num_rows, job.seed, config.curriculum)
    if loop := checkpoints.restore(done):
        stream.restored(loop["prompts"])
        for name, state in loop["best"].items():
            best[name].restored(state)
    if models.critic is not None:
        models.critic.module.offset = loop.get("value_offset", 0.0)
    writer = MetricsFile(job.metrics_file, config.steps, rank=world.rank, resumed_from=done)
    return Setup(
        config=config,
        models=models,
        prompts=prompts,
        validation=rows("prompts", "validation"),
        text=text,
        given=given,
        world=world,
        seed=job.seed,
        best=best,
        guard=DivergenceGuard(world, writer, best[VALIDATION], partial(ppo_advice, config=config)),
        checkpoints=checkpoints,
        done=done or 0,
        kl_coef=loop.get("kl_coef", config.kl.coef),
        stream=stream,
        answers=job.answers,
    )


def load_ppo_models(
    job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World
) -> PPOModels:
    """Load the models of `ppo`.

    Policies are the SFT model, but the reference may be a teacher. The critic starts from what
    `critic.start` names. The actor makes no update during the critic's warm-up.
    """
    trust = job.trust_remote_code
    steps = {"actor": config.steps - config.critic_warmup_steps, "critic": config.steps}
    updates = config.ppo_epochs * config.updates_per_epoch
    sources: dict[str, tuple[Any, str]] = {
        "reference": (load_policy, "teacher" if config.has_teacher else "sft_model"),
        "reward_model": (load_scores, "reward_model"),
        "critic": critic_start(config, job.inputs),
    }

    def load(model: TrainedModel | FrozenModel) -> Any:
        source, name = sources.get(model.name, (load_policy, "sft_model"))
        from_disk = partial(source, job.inputs[name], trust_remote_code=trust)
        if isinstance(model, TrainedModel):
            return train_engine(from_disk, model.config, steps[model.name] * updates)
        return frozen_model(from_disk, model.config, world)

    def longest_prompt() -> int:
        if config.has_turns:
            return config.longest_prompt(config.sampling)
        files = (job.inputs["prompts"] / f"{part}.arrow" for part in ("train", "validation"))
        return max(load_rows(file, world).longest("prompt_ids") for file in files)

    models = {model.name: load(model) for model in config.models()}
    actor, critic, reward_model = models["actor"], models.get("critic"), models.get("reward_model")
    if critic is not None and sources["critic"] == sources["reward_model"]:
        critic.module.scale = trained_weight(config.rewards)
    tokenizer = load_tokenizer(job.inputs["sft_model"], trust_remote_code=trust)
    reading = Reading([contract], config.micro_batch_tokens, world)
    rewards = load_rewards(job, config.rewards, config.score_clip, reading, tokenizer, reward_model)
    generator = load_generator(
        config.generator, config.sampling, longest_prompt, policy=actor, contract=contract,
        world=world, gather=config.gather_for_generation, hybrid=config.hybrid,
        place=f"{config.stage}.generator",
    )  # fmt: skip
    episodes = load_episodes(config, Reader(tokenizer, contract), job, world, config.stage)
    if "reference" not in models:  # an actor with adapters
        from rlhf_pipeline.models.lora import WithoutAdapters

        models["reference"] = WithoutAdapters(actor)
    return PPOModels(
        actor=actor,
        reference=models["reference"],
        critic=critic,
        reward_model=reward_model,
        rewards=rewards,
        generator=generator,
        contract=contract,
        tokenizer=tokenizer,
        ema=None if config.ema is None else EMA(actor, config.ema.decay),
        episodes=episodes,
    )


def critic_start(config: PPOConfig, inputs: Collection[str]) -> tuple[Callable[..., Any], str]:
    """What loads the critic, and the input with the model that it starts from."""
    start = "policy" if config.critic is None else config.critic.start
    if start == "reward_model" and "reward_model" in inputs:
        return load_scores, "reward_model"
    return untrained, "critic_base" if start == "own" else "sft_model"


def ppo_advice(metric: str, config: PPOConfig) -> str:
    """The fix for a metric of PPO that is not finite."""
    if metric.endswith("/score"):  # the reward model does not train: it was damaged from the start
        companion = config.reward_model_companion.deepspeed
        precision = config.reward_model.beside(companion).precision
        place = f"{config.stage}.reward_model.deepspeed.precision"
        return f"check the reward model and {place} ({precision})"
    if config.critic is not None and ("value" in metric or "critic" in metric):
        return stability_advice(f"{config.stage}.critic.", config.critic)
    actor = stability_advice(f"{config.stage}.actor.", config.actor)
    if not config.rewards:  # nothing holds the actor near its start
        return actor
    return f"{actor}, or raise {config.stage}.kl.coef ({config.kl.coef:g})"
