"""Stage program: PPO on the reward model's score, leashed to the SFT model.

    deepspeed --module rlhf_pipeline.training.ppo job.json

Four models: the actor trains, the reference is its frozen start, the critic trains, the reward model is frozen. Advantages
other than GAE's have no critic. Departures from InstructGPT: no pre-training loss; advantages are whitened; a cut response
gets a fixed score; training stops at a KL bound, and the best held-out checkpoint within the bound is exported, not the last.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.data.judges import judged
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.models.token_contract import common_contract
from rlhf_pipeline.rl.kl import adapted_kl_coef
from rlhf_pipeline.serving import write_mlmodel
from rlhf_pipeline.stages.job import LaunchedJob
from rlhf_pipeline.stages.program import run_program
from rlhf_pipeline.training.checkpoint import BestCheckpoint
from rlhf_pipeline.training.engine import World, join
from rlhf_pipeline.training.experience import Scored, make_experience, score
from rlhf_pipeline.training.four_models import FourModels, load_four_models
from rlhf_pipeline.training.metrics import MetricsWriter
from rlhf_pipeline.training.rollout import generate, uniform_draws
from rlhf_pipeline.training.rows import columns, load_rows, own_share, step_rows
from rlhf_pipeline.training.update import learn

VALIDATION = 2**31
"""Stands for the step in the random draws of held-out responses: the same at every evaluation, unlike any step's."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Train the actor, and export the checkpoint with the highest held-out score within the KL bound."""
    config = job.block("ppo", PPOConfig)
    contract = common_contract(job.inputs)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    models = load_four_models(job, config, contract, world)
    prompts = load_rows(job.inputs["prompts"] / "train.arrow", world)
    validation = load_rows(job.inputs["prompts"] / "validation.arrow", world)
    tokenizer = load_tokenizer(job.inputs["sft_model"])
    best = BestCheckpoint(job, world, tokenizer)
    writer = MetricsWriter(job.metrics_file, world, config.steps)
    train(models, config, prompts, validation, tokenizer, world=world, seed=job.seed, writer=writer, best=best)
    if best.merit is None:
        raise StageError(
            f"no evaluated actor stayed within ppo.kl.maximum {config.kl.maximum}; lower ppo.actor.optimizer.learning_rate, "
            "raise ppo.kl.coef, or evaluate more often (ppo.evaluations)"
        )
    best.finish(models.actor.module)
    if world.rank == 0:
        write_mlmodel(job.export)
    return best.metrics


def train(
    models: FourModels,
    config: PPOConfig,
    prompts: pa.Table,
    validation: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    world: World,
    seed: int,
    writer: MetricsWriter,
    best: BestCheckpoint,
) -> None:
    """Roll out, score, learn; evaluate on the way and offer actors within the KL bound to `best`."""
    evaluated = {round(config.steps * (i + 1) / config.evaluations) for i in range(config.evaluations)}
    kl_coef = config.kl.coef
    for step in range(1, config.steps + 1):
        start = time.monotonic()
        asked = step_rows(prompts.num_rows, config.prompts_per_step, step - 1, seed)
        # All prompts once, then all again: the ranks divide the prompts, so a rank has all responses to each of its own.
        rows = own_share(np.tile(asked, config.responses_per_prompt), world)
        slots = own_share(np.arange(config.responses_per_step), world)
        scored = roll_out(models, columns(prompts, rows)["prompt_ids"], config, seed=seed, step=step, slots=slots)
        generated = time.monotonic()
        experience = make_experience(
            scored, config, kl_coef=kl_coef, score_mean=models.reward_model.score_mean, world=world
        )
        stats = learn(models, experience, config, world, train_actor=step > config.critic_warmup_steps)
        metrics = rollout_metrics(scored, models.reward_model.score_mean, world) | stats
        metrics |= {"objective/kl_coef": kl_coef, "time/rollout_s": generated - start}
        kl = metrics["objective/kl"]
        if config.kl.target is not None:
            kl_coef = adapted_kl_coef(
                kl_coef, kl, target=config.kl.target, horizon=config.kl.horizon, batch_size=config.responses_per_step
            )
        beyond = config.kl.maximum is not None and kl > config.kl.maximum
        if step in evaluated and not beyond:
            held_out = evaluate(models, validation, tokenizer, config, world, seed)
            metrics |= {f"validation/{name.split('/')[1]}": value for name, value in held_out.items()}
            if config.kl.maximum is None or held_out["objective/kl"] <= config.kl.maximum:
                best.offer(models.actor.module, held_out["objective/score"], {"step": step} | metrics)
        metrics["time/step_s"] = time.monotonic() - start
        if beyond or step in evaluated or step % config.log_every == 0:
            writer.write(step, metrics)
        if beyond:
            break


def roll_out(
    models: FourModels,
    prompts: list[list[int]],
    config: PPOConfig,
    *,
    seed: int,
    step: int,
    slots: np.ndarray,
    with_values: bool = True,
) -> Scored:
    """Responses to this rank's prompts, as the models see them.

    Args:
        models: who takes part.
        prompts: token ids.
        config: sampling and batch sizes.
        seed, step, slots: the randomness; a slot is a row's number in the global batch.
        with_values: False saves the critic's forward pass.
    """
    draws = uniform_draws(seed, step, slots, config.sampling.max_response_tokens)
    rollout = generate(models.actor.module, prompts, draws, config.sampling, models.contract)
    return score(
        rollout,
        models.actor,
        models.reference,
        models.critic if with_values else None,
        models.reward_model,
        contract=models.contract,
        temperature=config.sampling.temperature,
        micro_batch_size=config.micro_batch_size_per_gpu,
    )


def rollout_metrics(scored: Scored, score_mean: float, world: World) -> dict[str, float]:
    """Means over the responses of all ranks."""
    sums = world.sums({name: value.to(world.device) for name, value in scored.sums(score_mean).items()})
    count = sums["responses"]
    return {
        "objective/score": sums["score"] / count,
        "objective/kl": sums["kl"] / count,
        "objective/kl_k3": sums["kl_k3"] / count,
        "rollout/response_tokens": sums["tokens"] / count,
        "rollout/eos_fraction": sums["ended"] / count,
    }


@torch.no_grad()
def evaluate(
    models: FourModels,
    validation: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    config: PPOConfig,
    world: World,
    seed: int,
) -> dict[str, float]:
    """Metrics of the actor on held-out prompts, with the same random draws at every evaluation.

    The gold score is among them where every prompt's source has a judge. It is there to be seen: no choice rests on it.
    """
    count = min(config.evaluation_prompts, validation.num_rows)
    slots = own_share(np.arange(count), world)
    prompts = columns(validation, slots)
    scored = roll_out(models, prompts["prompt_ids"], config, seed=seed, step=VALIDATION, slots=slots, with_values=False)
    metrics = rollout_metrics(scored, models.reward_model.score_mean, world)
    texts = tokenizer.batch_decode(scored.rollout.response_ids, skip_special_tokens=True)
    gold = [g for g in map(judged, prompts["source"], prompts["messages"], texts) if g is not None]
    total, unjudged = world.sum(torch.tensor([sum(gold), len(texts) - len(gold)]).double().to(world.device)).tolist()
    return metrics if unjudged else metrics | {"objective/gold_score": total / count}


if __name__ == "__main__":
    run_program(main)
