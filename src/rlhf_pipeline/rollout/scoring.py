"""Scoring a rollout: a forward pass of each model over prompts and responses.

Shapes: B responses of this rank, R response tokens (right-padded).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import micro_batches
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import (
    response_logprobs,
    response_logprobs_and_entropy,
    response_values,
    sequence_scores,
)
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.rollout.records import Scored, TrainingPass
from rlhf_pipeline.runtime import heartbeat


@dataclass(frozen=True)
class ScoringModels:
    """The models that score a rollout, and their settings."""

    policy: nn.Module  # the policy that sampled
    reference: nn.Module
    critic: nn.Module | None
    reward_model: nn.Module | None
    contract: TokenContract
    world: World
    temperature: float  # the sampling temperature
    micro_batch_tokens: int  # tokens of one forward pass
    entropy_trains: bool = False  # whether the loss contains the entropy


@torch.no_grad()
def score_sequences(
    sequences: Sequences,
    models: ScoringModels,
    *,
    logprobs: Tensor | None = None,
    trains: bool = False,
) -> Scored:
    """Score sequences by a forward pass of each model.

    Args:
        logprobs: (B, R) those of the policy, if they are known.
        trains: keep the graphs of policy and critic for the loss; one forward pass for all rows.
    """
    vocab_size, temperature = models.contract.vocab_size, models.temperature
    logprobs_of = partial(response_logprobs, vocab_size=vocab_size, temperature=temperature)

    def run(function: Callable[..., Tensor], model: nn.Module) -> Tensor:
        return by_micro_batches(function, model, sequences, models.micro_batch_tokens, models.world)

    ref_logprobs = run(logprobs_of, models.reference)
    scores = torch.zeros(len(sequences))
    if models.reward_model is not None:
        scores = run(sequence_scores, models.reward_model)
    # Last, because an actor with adapters is its own reference.
    kept = with_graphs(sequences, models) if trains else None
    if logprobs is None:
        logprobs = run(logprobs_of, models.policy) if kept is None else kept.logprobs.detach().cpu()
    values = None
    if kept is not None and kept.values is not None:
        values = kept.values.detach().cpu()
    elif models.critic is not None:
        values = run(response_values, models.critic)
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
def with_graphs(sequences: Sequences, models: ScoringModels) -> TrainingPass:
    """Run the policy and the critic on all rows together."""
    batch = sequences.to(models.world.device)
    logprobs, entropy = response_logprobs_and_entropy(
        models.policy,
        batch,
        vocab_size=models.contract.vocab_size,
        temperature=models.temperature,
        entropy_trains=models.entropy_trains,
    )
    heartbeat.tick()
    values = None if models.critic is None else response_values(models.critic, batch)
    heartbeat.tick()
    return TrainingPass(logprobs, entropy, values)


def ended(response_ids: Tensor, contract: TokenContract) -> Tensor:
    """Which responses (B, R) end by themselves, (B,) bool. Padding is never EOS."""
    return torch.isin(response_ids, response_ids.new_tensor(contract.eos_ids)).any(1)


def by_micro_batches(
    function: Callable[[nn.Module, Sequences], Tensor],
    model: nn.Module,
    sequences: Sequences,
    tokens: int,
    world: World,
) -> Tensor:
    """Apply a model by a function that returns (b,) or (b, r) to micro batches of rows.

    All ranks call this together, with equally many rows.

    Returns:
        (B,) or (B, R) float32 on the CPU, in the order of the rows, padded with zeros.
    """
    (groups,), parts = micro_batches([sequences.lengths], tokens, model, world), []
    width = sequences.response_ids.shape[1]
    for index in groups:
        part = function(model, sequences.rows(index).to(world.device)).float()
        parts.append(part if part.dim() == 1 else pad(part, (0, width - part.shape[1])))
        heartbeat.tick()
    # The host waits for the device here and nowhere above.
    return torch.cat(parts).cpu()[torch.cat(groups).argsort()]
