"""Stage program: PPO, or GRPO, on the score of `ppo.rewards`, with a KL penalty to the SFT model.

    deepspeed --module rlhf_pipeline.training.ppo job.json

Four models: the actor trains, the reference is its frozen start, the critic trains, the reward
model is frozen. GRPO and other advantages than GAE's need no critic. With `ppo.ptx`, a loss on
plain text is added to the actor's (PPO-ptx).

Departures from InstructGPT (Ouyang et al. 2022):

    1. Scores of reward models are centred and clipped; a response without EOS loses a part of its
       score (`reward_sources.RewardSum`, `rl.rewards.shaped_scores`).
    2. The critic's values start with the mean of the first returns (`experience.value_offset`).
    3. Advantages are whitened over the batch of all ranks (`experience.make_experience`).
    4. The mean of a loss is over the tokens of a whole optimizer step, on all ranks, so the numbers
       of ranks and of micro batches do not change it (`rl.losses`).
    5. No model uses dropout; log ratios are clamped, the value loss is clipped (`rl.losses`).
    6. The KL coefficient may adapt, and training stops at a KL bound (`next_kl_coef`,
       `exceeds_bound`).
    7. The export is the best evaluated model within the bound, not the last one (`evaluate`).
"""

from typing import Any

import numpy as np
import torch

from rlhf_pipeline.config.episodes import CODE_PREFIX
from rlhf_pipeline.config.policies import POLICIES
from rlhf_pipeline.config.ppo import ADVANTAGE_OF, PPOConfig
from rlhf_pipeline.config.rewards import INPUT_PREFIX
from rlhf_pipeline.config.training import evaluation_steps
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import own_share, sampled_rows
from rlhf_pipeline.distributed.weights import require_learned
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.rl.rewards import adapted_kl_coef
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.training.experience import make_experience, value_offset
from rlhf_pipeline.training.ppo_metrics import (
    quality_metrics,
    rollout_fault,
    rollout_metrics,
    sampled_answers,
    sampler_fault,
)
from rlhf_pipeline.training.ppo_setup import VALIDATION, Setup, critic_start, policies, set_up
from rlhf_pipeline.training.ppo_update import update_models
from rlhf_pipeline.training.rollouts import (
    columns_of,
    one_pass,
    resample,
    roll_out,
    score,
    training_prompts,
)
from rlhf_pipeline.training.step_log import StepLog

HELD_OUT_STEP = 2**31
"""Stands for the step in the seeds of held-out responses: equal at every evaluation, and different
from the seeds of every training step."""


def main(job: LaunchedJob) -> dict[str, float]:
    """Train the actor; export the best evaluated model within the KL bound."""
    config = job.block(job.stage, POLICIES[job.stage])
    files = INPUT_PREFIX, CODE_PREFIX
    sharing = {name: path for name, path in job.inputs.items() if not name.startswith(files)}
    if critic_start(config, job.inputs)[1] != "reward_model":
        sharing.pop("reward_model", None)  # it may read text
    contract = common_contract(
        sharing, f"set {job.stage}.critic.start to policy, or train all again"
    )
    setup = set_up(job, config, contract, join(job.seed, timeout_s=job.collective_timeout_s))
    train(setup)
    return export(setup)


def train(setup: Setup) -> None:
    """Take all steps: roll out, score, make experience, update, evaluate.

    Raises Interrupted after a signal, with the checkpoint of the last step, and StageError if a
    metric is not finite, or a rollout contains nothing to learn from.
    """
    config, kl_coef, critic = setup.config, setup.kl_coef, setup.models.critic
    evaluated = evaluation_steps(config.steps, config.evaluations)
    for step in range(setup.done + 1, config.steps + 1):
        log = StepLog(step, setup.guard)
        with log.timed("time/rollout_s"):
            # 1. Sample a response to each prompt.
            rows, seeds = training_prompts(setup, step)
            with log.timed("time/generation_s"):
                rollout = roll_out(setup, rows, seeds, step)
            # 2. Score the responses by all models; replace prompts that teach nothing.
            scored = score(setup, rollout, rows, trains=one_pass(setup, rollout, step))
            scored, chosen = resample(setup, scored, rows, step)
        sampled = scored.sequences
        log.saw(rows=sampled.prompt_ids, samples=sampled.response_ids)
        if step == 1 and critic is not None:  # give its values the mean of the first returns
            offset = value_offset(scored, config, kl_coef=kl_coef, world=setup.world)
            critic.module.offset = offset
            scored = scored.with_values_plus(offset)
        # In the first step that trains it, the actor is still the SFT model.
        trained = step > config.critic_warmup_steps + 1
        metrics = rollout_metrics(scored, config, setup.world) | chosen
        where = f"at step {step}"
        log.add(metrics, rollout_fault(metrics, config, where, trained=trained))
        # 3. Compute the advantage of each token.
        experience = make_experience(scored, config, kl_coef=kl_coef, world=setup.world)
        # 4. Update actor and critic.
        heartbeat.begin_phase("update")
        metrics = update_models(setup, experience, step, kl_coef)
        metrics["objective/kl_coef"] = kl_coef
        if config.logprobs_in_update:
            shaped, kl = log.metrics["objective/shaped_score"], metrics["objective/kl"]
            metrics["objective/rlhf_reward"] = shaped - config.kl.coef * kl
        fault = rollout_fault(log.metrics | metrics, config, where, trained=trained)
        log.add(metrics, sampler_fault(metrics, config, step) or fault)
        if config.advantage in ADVANTAGE_OF["equal_groups"]:
            is_equal = log.metrics["rollout/equal_groups"] == 1
            setup.checkpoints.known.setdefault("taught", []).append(not is_equal)
        # 5. Evaluate on held-out prompts, unless the KL is above its bound.
        stop = exceeds_bound(log.metrics, config)
        if evaluates := step in evaluated and not stop:
            evaluate(setup, log)
        best = setup.best[VALIDATION].best
        if stop and best is not None:  # without a model to export, the stage fails
            log.further["note"] = stop_note(config, log, best.step)
        log.write(due=stop or evaluates or step % config.log_every == 0)
        if stop:
            break
        # 6. Adapt the KL coefficient, and save what training needs to resume.
        kl_coef = next_kl_coef(kl_coef, log.metrics["objective/kl"], config)
        due = config.checkpoint_due(step, last=config.steps, evaluated=evaluates)
        setup.save(step, due=due, kl_coef=kl_coef)


def evaluate(setup: Setup, log: StepLog) -> None:
    """Evaluate each policy on held-out prompts; offer it for export if it is within the bound."""
    for prefix, in_place in policies(setup.models).items():
        with in_place():
            metrics, answers = held_out(setup)
            if answers and prefix == VALIDATION:
                log.further["answers"] = [{"step": log.step} | each for each in answers]
            where = f"on held-out prompts after step {log.step}"
            named = {
                f"{prefix}/{name.removeprefix('objective/').removeprefix('rollout/')}": value
                for name, value in metrics.items()
            }
            log.add(named, rollout_fault(metrics, setup.config, where, trained=True))
            if not exceeds_bound(metrics, setup.config):
                reward = metrics["objective/rlhf_reward"]
                setup.best[prefix].offer(setup.models.actor, log.step, reward, dict(log.metrics))


@torch.no_grad()
def held_out(setup: Setup) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics of the actor on held-out prompts, and its answers to the first of them.

    Prompts and seeds are the same at every evaluation. Gold score and accuracy, if known for every
    prompt, are only shown: no choice depends on them.
    """
    validation, world = setup.validation, setup.world
    # Equally many prompts on each rank: ZeRO-3 needs all ranks in every forward pass.
    count = min(setup.config.evaluation_prompts, validation.num_rows)
    count = max(world.size, count - count % world.size)
    slots = own_share(np.arange(count), world)
    rows = columns_of(validation, sampled_rows(validation.num_rows, count, setup.seed)[slots])
    rollout = roll_out(setup, rows, row_seeds(setup.seed, HELD_OUT_STEP, slots))
    scored = score(setup, rollout, rows, held_out=True)
    metrics = rollout_metrics(scored, setup.config, world, held_out=True)
    metrics |= quality_metrics(rows, scored, setup)
    return metrics, sampled_answers(rows, scored, setup, min(setup.answers, count))


def exceeds_bound(metrics: dict[str, float], config: PPOConfig) -> bool:
    """Whether the KL of a rollout is above `ppo.kl.maximum`."""
    return config.kl.maximum is not None and metrics["objective/kl"] > config.kl.maximum


def stop_note(config: PPOConfig, log: StepLog, exported: int) -> str:
    """Why training stops, and the step of the model that is exported."""
    return (
        f"stopped after step {log.step} of {config.steps}: KL {log.metrics['objective/kl']:.2f} "
        f"exceeds {config.stage}.kl.maximum {config.kl.maximum:g}; the best model within the "
        f"limit, of step {exported}, is exported"
    )


def next_kl_coef(kl_coef: float, kl: float, config: PPOConfig) -> float:
    """The KL coefficient of the next step: adapted to hold `ppo.kl.target`, or unchanged."""
    size, target, horizon = config.responses_per_step, config.kl.target, config.kl.horizon
    if target is None:
        return kl_coef
    return adapted_kl_coef(kl_coef, kl, target=target, horizon=horizon, batch_size=size)


def export(setup: Setup) -> dict[str, float]:
    """Export the best model of each policy; return the metrics of the actor's. Raises StageError if
    nothing was learned, or no evaluated model was within the KL bound."""
    metrics, stage = {}, setup.config.stage
    known = setup.checkpoints.known
    require_learned(setup.models.actor, setup.world, known, f"{stage}.actor")
    for name, best in setup.best.items():
        if best.best is None:
            raise StageError(
                f"{stage}.kl.maximum: no evaluated actor was within {setup.config.kl.maximum} nats "
                f"({name}/kl). Fix: lower {stage}.actor.optimizer.learning_rate, raise "
                f"{stage}.kl.coef, or evaluate more often ({stage}.evaluations)"
            )
        with policies(setup.models)[name]():
            metrics[name] = best.finish()
    share = {"learned/taught": float(np.mean(known["taught"]))} if "taught" in known else {}
    return metrics[VALIDATION] | share


if __name__ == "__main__":
    run_program(main)
