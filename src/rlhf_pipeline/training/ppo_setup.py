from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows, load_rows
from rlhf_pipeline.distributed.deepspeed_config import store_settings
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.training.best_models import BestModels
from rlhf_pipeline.training.divergence import DivergenceGuard
from rlhf_pipeline.training.ppo_models import PPOModels, load_ppo_models
from rlhf_pipeline.training.ptx import TextBatches, load_text
from rlhf_pipeline.training.resume import Checkpoints
from rlhf_pipeline.training.rollout_faults import ppo_advice

VALIDATION, VALIDATION_EMA = "validation", "validation_ema"
"""Prefixes of held-out metrics: of the actor, and of the average of its weights."""


@dataclass(frozen=True)
class Setup:
    """What PPO works with, from its first step or from the step after a checkpoint."""

    config: PPOConfig
    models: PPOModels
    prompts: Rows
    validation: Rows
    text: TextBatches | None
    """For `ppo.ptx`; None if it is off."""
    world: World
    seed: int
    best: dict[str, BestModels]
    """By prefix of the metrics: one for each policy of `policies`."""
    guard: DivergenceGuard
    checkpoints: Checkpoints
    done: int
    """Steps that an earlier attempt has taken."""
    kl_coef: float
    """The KL coefficient of the next step."""

    def save(self, step: int, *, due: bool, kl_coef: float) -> None:
        """Save a checkpoint if one is due or a signal came; then obey the signal.

        Raises:
            Interrupted: a signal came.
        """
        best = {name: models.state() for name, models in self.best.items()}
        critic = self.models.critic
        loop = {"kl_coef": kl_coef, "best": best} | (
            {} if critic is None else {"value_offset": critic.module.offset}
        )
        if self.checkpoints.step_ended(step, due=due, loop=loop):
            for models in self.best.values():
                models.forget_the_rest()


def policies(models: PPOModels) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """The policies that are evaluated and may be exported, by the prefix of their metrics.

    Each value makes a context in which the actor has the weights of that policy.
    """
    found: dict[str, Callable[[], AbstractContextManager[object]]] = {VALIDATION: nullcontext}
    if models.ema is not None:
        found[VALIDATION_EMA] = models.ema.in_place
    return found


def set_up(job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World) -> Setup:
    """Load models and data; restore the checkpoint if resuming."""
    text = load_text(job, config, world)
    models = load_ppo_models(job, config, contract, world)
    store_settings(models.deepspeed_settings(), job)
    load = partial(load_policy, job.inputs["sft_model"], trust_remote_code=job.trust_remote_code)
    kept = partial(
        BestModels, job, world, models.tokenizer, config.actor, load, keep=config.keep_best
    )
    best = {VALIDATION: kept()}
    if models.ema is not None:
        best[VALIDATION_EMA] = kept(variant="ema")
    checkpoints = models.checkpoints(job.checkpoints, world, keep=config.keep_last)
    loop = checkpoints.restore(job.resume_from)
    for name, state in loop.get("best", {}).items():
        best[name].restored(state)
    if models.critic is not None:
        models.critic.module.offset = loop.get("value_offset", 0.0)
    writer = MetricsFile(
        job.metrics_file, config.steps, rank=world.rank, resumed_from=job.resume_from
    )
    return Setup(
        config=config,
        models=models,
        prompts=load_rows(job.inputs["prompts"] / "train.arrow", world),
        validation=load_rows(job.inputs["prompts"] / "validation.arrow", world),
        text=text,
        world=world,
        seed=job.seed,
        best=best,
        guard=DivergenceGuard(world, writer, best[VALIDATION], partial(ppo_advice, config=config)),
        checkpoints=checkpoints,
        done=job.resume_from or 0,
        kl_coef=loop.get("kl_coef", config.kl.coef),
    )
