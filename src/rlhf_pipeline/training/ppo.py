"""Stage program: PPO on the score of `ppo.rewards`, leashed to the SFT model.

    deepspeed --module rlhf_pipeline.training.ppo job.json

Four models: the actor trains, the reference is its frozen start, the critic trains, the reward model is frozen. Advantages
other than GAE's have no critic. With `ppo.ptx`, a loss on plain text is mixed into the actor's (PPO-ptx). Departures from
InstructGPT: advantages are whitened; a cut response gets a fixed score; training stops at a KL bound, and the best held-out
checkpoint within the bound is exported, not the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import INPUT_PREFIX
from rlhf_pipeline.data.gold import judged
from rlhf_pipeline.data.token_contract import TokenContract, common_contract
from rlhf_pipeline.distributed.batches import columns, load_rows, own_share, step_rows
from rlhf_pipeline.distributed.deepspeed_config import store_settings
from rlhf_pipeline.distributed.metrics_writer import MetricsWriter
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.distributed.zero import for_generation, is_sharded
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.models.mlflow_format import write_mlmodel
from rlhf_pipeline.rl.kl import adapted_kl_coef
from rlhf_pipeline.rollout.generation import generate, uniform_draws
from rlhf_pipeline.rollout.scoring import Scored, score
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.best_models import BestModels
from rlhf_pipeline.training.divergence import Watch
from rlhf_pipeline.training.experience import make_experience
from rlhf_pipeline.training.ppo_faults import remedy, rollout_fault
from rlhf_pipeline.training.ppo_models import PPOModels, load_ppo_models
from rlhf_pipeline.training.ppo_update import learn
from rlhf_pipeline.training.ptx import TextBatches, load_text
from rlhf_pipeline.training.resume import Checkpoints

VALIDATION, VALIDATION_EMA = "validation", "validation_ema"
"""Prefixes of held-out metrics: the actor's, and those of the average of its weights."""

HELD_OUT = 2**31
"""Stands for the step in the random draws of held-out responses: the same at every evaluation, unlike any step's."""


@dataclass(frozen=True)
class Setup:
    """What PPO works with, from its first step or from the one after a checkpoint."""

    config: PPOConfig
    models: PPOModels
    prompts: pa.Table
    validation: pa.Table
    text: TextBatches | None
    """For `ppo.ptx`; None where it is off."""
    world: World
    seed: int
    writer: MetricsWriter
    best: dict[str, BestModels]
    """By prefix of the metrics: one for each policy of `candidates`."""
    checkpoints: Checkpoints
    done: int
    """Steps that were taken before."""
    kl_coef: float
    """The coefficient after them."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Train the actor, and export the checkpoint with the highest held-out score within the KL bound."""
    config = job.block("ppo", PPOConfig)
    contract = common_contract(
        {name: path for name, path in job.inputs.items() if not name.startswith(INPUT_PREFIX)}
    )
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    setup = set_up(job, config, contract, world)
    train(setup)
    return export(setup)


def set_up(job: LaunchedJob, config: PPOConfig, contract: TokenContract, world: World) -> Setup:
    """Load all that takes part, and stand where the checkpoint of `job.resume_from` was taken, if it names one."""
    text = load_text(job, config, world)
    models = load_ppo_models(job, config, contract, world)
    store_settings(models.deepspeed_settings(), job)
    start = job.inputs["sft_model"]
    load = partial(load_policy, start, trust_remote_code=job.trust_remote_code)
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
    return Setup(
        config=config,
        models=models,
        prompts=load_rows(job.inputs["prompts"] / "train.arrow", world),
        validation=load_rows(job.inputs["prompts"] / "validation.arrow", world),
        text=text,
        world=world,
        seed=job.seed,
        writer=MetricsWriter(job.metrics_file, world, config.steps, resumed_from=job.resume_from),
        best=best,
        checkpoints=checkpoints,
        done=job.resume_from or 0,
        kl_coef=loop.get("kl_coef", config.kl.coef),
    )


def export(setup: Setup) -> dict[str, float]:
    """Export the best of each policy; returns the metrics of the actor's.

    Raises:
        StageError: none was ever within the KL bound.
    """
    metrics = {}
    for name, kept in setup.best.items():
        if kept.best is None:
            raise StageError(
                f"no actor stayed within ppo.kl.maximum {setup.config.kl.maximum} ({name}/kl); lower "
                "ppo.actor.optimizer.learning_rate, raise ppo.kl.coef, or evaluate more often (ppo.evaluations)"
            )
        with candidates(setup.models)[name]():
            metrics[name] = kept.finish(setup.models.actor)
        if setup.world.rank == 0:
            write_mlmodel(kept.export)
    return metrics[VALIDATION]


def candidates(models: PPOModels) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """The policies that are evaluated and may be exported, by the prefix of their metrics: what makes them the actor's."""
    found: dict[str, Callable[[], AbstractContextManager[object]]] = {VALIDATION: nullcontext}
    if models.ema is not None:
        found[VALIDATION_EMA] = models.ema.in_place
    return found


def train(setup: Setup) -> None:
    """Roll out, score, learn; evaluate on the way and offer the policies within the KL bound to `setup.best`.

    Raises:
        Interrupted: the program was asked to end, after a step and with a checkpoint of it.
        StageError: a metric of some step is not finite, or nothing can be learned from its rollout: `rollout_fault`.
    """
    config, models, world, kl_coef = setup.config, setup.models, setup.world, setup.kl_coef
    watch = Watch(
        world, setup.writer, setup.best[VALIDATION], lambda metric: remedy(metric, config)
    )
    evaluated = {
        round(config.steps * (i + 1) / config.evaluations) for i in range(config.evaluations)
    }
    for step in range(setup.done + 1, config.steps + 1):
        heartbeat.at("rollout", step)
        start = time.monotonic()
        asked = step_rows(setup.prompts.num_rows, config.prompts_per_step, step - 1, setup.seed)
        # All prompts once, then all again: the ranks divide the prompts, so a rank has all responses to each of its own.
        rows = columns(setup.prompts, own_share(np.tile(asked, config.responses_per_prompt), world))
        slots = own_share(np.arange(config.responses_per_step), world)
        scored = roll_out(models, rows, config, seed=setup.seed, step=step, slots=slots)
        generated = time.monotonic()
        trains_actor = step > config.critic_warmup_steps
        metrics = rollout_metrics(scored, models.score_mean, world)
        # In the first step that trains it, the actor is still the SFT model.
        fault = rollout_fault(
            metrics, config, f"at step {step}", trained=step > config.critic_warmup_steps + 1
        )
        if fault is not None:
            watch.fail(step, metrics, fault)
        watch.require_finite(step, metrics)
        experience = make_experience(
            scored, config, kl_coef=kl_coef, score_mean=models.score_mean, world=world
        )
        heartbeat.at("update")
        texts = None if setup.text is None else setup.text.of_step(step)
        metrics |= learn(models, experience, config, world, train_actor=trains_actor, texts=texts)
        metrics |= {"objective/kl_coef": kl_coef, "time/rollout_s": generated - start}
        watch.require_finite(step, metrics)
        kl = metrics["objective/kl"]
        if config.kl.target is not None:
            kl_coef = adapted_kl_coef(
                kl_coef,
                kl,
                target=config.kl.target,
                horizon=config.kl.horizon,
                batch_size=config.responses_per_step,
            )
        beyond = config.kl.maximum is not None and kl > config.kl.maximum
        if step in evaluated and not beyond:
            metrics = offer(setup, watch, step, metrics)
        metrics["time/step_s"] = time.monotonic() - start
        if beyond or step in evaluated or step % config.log_every == 0:
            setup.writer.write(step, metrics)
        if beyond:
            break
        loop = {
            "kl_coef": kl_coef,
            "best": {name: kept.state() for name, kept in setup.best.items()},
        }
        setup.checkpoints.step_ended(
            step, due=step in evaluated or config.checkpoint_due(step), loop=loop
        )
        for kept in setup.best.values():
            kept.forget_the_rest()


def offer(setup: Setup, watch: Watch, step: int, metrics: dict[str, float]) -> dict[str, float]:
    """Evaluate each policy and offer it to `setup.best` if it is within the KL bound; returns all metrics of the step."""
    bound = setup.config.kl.maximum
    for prefix, as_actor in candidates(setup.models).items():
        with as_actor():
            held_out = evaluate(
                setup.models, setup.validation, setup.config, setup.world, setup.seed
            )
            metrics = metrics | {
                f"{prefix}/{_short(name)}": value for name, value in held_out.items()
            }
            fault = rollout_fault(
                held_out, setup.config, f"on held-out prompts after step {step}", trained=True
            )
            if fault is not None:
                watch.fail(step, metrics, fault)
            watch.require_finite(step, metrics)
            if bound is None or held_out["objective/kl"] <= bound:
                merit = held_out["objective/score"]
                setup.best[prefix].offer(setup.models.actor, step, merit, metrics)
    return metrics


def roll_out(
    models: PPOModels,
    rows: Mapping[str, list[Any]],
    config: PPOConfig,
    *,
    seed: int,
    step: int,
    slots: np.ndarray,
    held_out: bool = False,
) -> Scored:
    """Responses to this rank's prompts, as the models see them and with their scores.

    Args:
        models: who takes part.
        rows: columns of the prompts' table.
        config: sampling and batch sizes.
        seed, step, slots: the randomness; a slot is a row's number in the global batch.
        held_out: nothing is learned from them: without the critic's forward pass, and a part of the evaluation for those
            who ask where this rank is.
    """
    draws = uniform_draws(seed, step, slots, config.sampling.max_response_tokens).to(
        models.actor.device
    )
    with for_generation(models.actor, gather=config.gather_for_generation) as policy:
        synced = is_sharded(policy) and not config.gather_for_generation
        rollout = generate(
            policy, rows["prompt_ids"], draws, config.sampling, models.contract, synced=synced
        )
    heartbeat.at("evaluation" if held_out else "scoring")
    scored = score(
        rollout,
        models.actor,
        models.reference,
        None if held_out else models.critic,
        models.reward_model,
        contract=models.contract,
        device=models.actor.device,
        temperature=config.sampling.temperature,
        micro_batch_size=config.micro_batch_size_per_gpu,
    )
    return scored if models.rewards is None else models.rewards(scored, rows)


def rollout_metrics(scored: Scored, score_mean: float, world: World) -> dict[str, float]:
    """Means over the responses of all ranks."""
    sums = world.sums(
        {name: value.to(world.device) for name, value in scored.sums(score_mean).items()}
    )
    count = sums["responses"]
    return {
        "objective/score": sums["score"] / count,
        "objective/kl": sums["kl"] / count,
        "objective/kl_k3": sums["kl_k3"] / count,
        "rollout/response_tokens": sums["tokens"] / count,
        "rollout/eos_fraction": sums["ended"] / count,
        **{name: value / count for name, value in sums.items() if name.startswith("reward/")},
        **({"value/mean": sums["values"] / sums["tokens"]} if "values" in sums else {}),
    }


def _short(metric: str) -> str:
    """The name of a rollout's metric under the prefix of held-out ones."""
    return metric.removeprefix("objective/").removeprefix("rollout/")


@torch.no_grad()
def evaluate(
    models: PPOModels, validation: pa.Table, config: PPOConfig, world: World, seed: int
) -> dict[str, float]:
    """Metrics of the actor on held-out prompts, with the same random draws at every evaluation.

    The gold score is among them where every prompt's source has a judge. It is there to be seen: no choice rests on it.
    """
    heartbeat.at("evaluation")
    # As many on each rank, so that all take part in every forward pass, as ZeRO-3 demands.
    count = max(1, min(config.evaluation_prompts, validation.num_rows) // world.size) * world.size
    slots = own_share(np.arange(count), world)
    own = columns(validation, slots)
    scored = roll_out(models, own, config, seed=seed, step=HELD_OUT, slots=slots, held_out=True)
    metrics = rollout_metrics(scored, models.score_mean, world)
    texts = models.tokenizer.batch_decode(scored.rollout.response_ids, skip_special_tokens=True)
    gold = [g for g in map(judged, own["source"], own["messages"], texts) if g is not None]
    total, unjudged = world.sum(
        torch.tensor([sum(gold), len(texts) - len(gold)]).double().to(world.device)
    ).tolist()
    return metrics if unjudged else metrics | {"objective/gold_score": total / count}


if __name__ == "__main__":
    run_program(main)
