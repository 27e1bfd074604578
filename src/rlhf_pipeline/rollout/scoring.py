"""Scoring a rollout: one forward pass of each model over prompts and responses.

Shapes: B responses of this rank, R response tokens (right-padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.forward import response_logprobs, response_values, sequence_scores
from rlhf_pipeline.models.sequences import Sequences, micro_batches
from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rl.masking import masked_sum
from rlhf_pipeline.runtime import heartbeat


@dataclass(frozen=True)
class Scored:
    """A rollout as the models see it."""

    rollout: Sequences
    logprobs: Tensor
    """(B, R) log pi_old(token), of the actor that sampled."""
    ref_logprobs: Tensor
    """(B, R) log pi_ref(token)."""
    values: Tensor | None
    """(B, R) V of the state before each token; None without a critic."""
    scores: Tensor
    """(B,) the reward model's raw score; zeros without one. Or the centred sum over several sources of rewards."""
    ended: Tensor
    """(B,) bool: the response ended by itself."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Where several sources are summed, each one's centred score before its weight, (B,)."""

    def sums(self, score_mean: float) -> dict[str, Tensor]:
        """Additive sums over responses, for metrics; scores are relative to the demonstrations' mean."""
        mask = self.rollout.response_mask
        values = {} if self.values is None else {"values": masked_sum(self.values, mask).double()}
        return values | {
            "responses": torch.tensor(float(len(self.scores))),
            "score": (self.scores - score_mean).sum().double(),
            "kl": masked_sum(kl_estimate(self.logprobs, self.ref_logprobs, "k1"), mask).double(),
            "kl_k3": masked_sum(kl_estimate(self.logprobs, self.ref_logprobs, "k3"), mask).double(),
            "tokens": mask.sum().double(),
            "ended": self.ended.sum().double(),
            **{f"reward/{name}": scores.sum().double() for name, scores in self.parts.items()},
        }


@torch.no_grad()
def score(
    rollout: Sequences,
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    reward_model: nn.Module | None,
    *,
    contract: TokenContract,
    device: torch.device,
    temperature: float,
    micro_batch_size: int,
) -> Scored:
    """One forward pass of each model over the rollout."""

    def run(function: Callable[[Sequences], Tensor]) -> Tensor:
        return by_micro_batches(function, rollout, micro_batch_size, device)

    def logprobs(policy: nn.Module) -> Tensor:
        return run(
            lambda b: response_logprobs(
                policy, b, vocab_size=contract.vocab_size, temperature=temperature
            )
        )

    return Scored(
        rollout=rollout,
        logprobs=logprobs(actor),
        ref_logprobs=logprobs(reference),
        values=None if critic is None else run(lambda b: response_values(critic, b)),
        scores=torch.zeros(len(rollout))
        if reward_model is None
        else run(lambda b: sequence_scores(reward_model, b)),
        ended=(rollout.response_ids == contract.eos_id).any(1),
    )


def by_micro_batches(
    function: Callable[[Sequences], Tensor], rollout: Sequences, size: int, device: torch.device
) -> Tensor:
    """A function of a batch, (b,) or (b, r), applied to micro batches of like length; rows come back in their order, on
    the CPU, padded with zeros to (B,) or (B, R)."""
    whole: Tensor | None = None
    for index in micro_batches(rollout.lengths, size):
        part = function(rollout.rows(index).to(device)).float().cpu()
        if whole is None:
            shape = (
                rollout.response_ids.shape if part.dim() == 2 else rollout.response_ids.shape[:1]
            )
            whole = torch.zeros(shape)
        if part.dim() == 2:
            whole[index, : part.shape[1]] = part
        else:
            whole[index] = part
        heartbeat.tick()
    assert whole is not None, "a rollout has at least one row"
    return whole
