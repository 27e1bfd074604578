"""Scoring a rollout: a forward pass of each model over prompts and responses.

Shapes: B responses of this rank, R response tokens (right-padded).
"""

from functools import partial

import torch
from torch import Tensor

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.batches import by_micro_batches
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import (
    response_logprobs,
    response_logprobs_and_entropy,
    response_values,
    sequence_scores,
)
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rollout.records import Scored, TrainingPass, ended
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.training.ppo_setup import PPOModels


@torch.no_grad()
def score_sequences(
    sequences: Sequences,
    models: PPOModels,
    config: PPOConfig,
    world: World,
    *,
    with_critic: bool = True,
    logprobs: Tensor | None = None,
    trains: bool = False,
) -> Scored:
    """Score sequences by a forward pass of each model.

    Args:
        with_critic: False leaves the values out.
        logprobs: (B, R) those of the actor, if they are known.
        trains: keep the graphs of actor and critic for the loss; one forward pass for all rows.
    """
    critic = models.critic if with_critic else None
    logprobs_of = partial(
        response_logprobs,
        vocab_size=models.contract.vocab_size,
        temperature=config.sampling.temperature,
    )
    run = partial(
        by_micro_batches, sequences=sequences, tokens=config.micro_batch_tokens, world=world
    )
    ref_logprobs = run(logprobs_of, models.reference)
    scores = torch.zeros(len(sequences))
    if models.reward_model is not None:
        scores = run(sequence_scores, models.reward_model)
    # Last, because an actor with adapters is its own reference.
    kept = _with_graphs(sequences, models, config, world) if trains else None
    if logprobs is None:
        logprobs = run(logprobs_of, models.actor) if kept is None else kept.logprobs.detach().cpu()
    values = None
    if kept is not None and kept.values is not None:
        values = kept.values.detach().cpu()
    elif critic is not None:
        values = run(response_values, critic)
    return Scored(
        sequences=sequences,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=scores,
        ended=ended(sequences.response_ids, models.contract),
        training_pass=kept,
    )


@torch.enable_grad()
def _with_graphs(
    sequences: Sequences, models: PPOModels, config: PPOConfig, world: World
) -> TrainingPass:
    batch = sequences.to(world.device)
    logprobs, entropy = response_logprobs_and_entropy(
        models.actor,
        batch,
        vocab_size=models.contract.vocab_size,
        temperature=config.sampling.temperature,
        entropy_trains=config.entropy_coef > 0,
    )
    heartbeat.tick()
    values = None if models.critic is None else response_values(models.critic, batch)
    heartbeat.tick()
    return TrainingPass(logprobs, entropy, values)
