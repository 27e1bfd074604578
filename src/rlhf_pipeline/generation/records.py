"""The record of one step: what is known of its responses, in the order of time.

    Rollout     prompts and sampled responses                       Generator.generate
    Scored      with the outputs of all models                      score_sequences, RewardSum
    Experience  with advantages: what actor and critic train on     make_experience

Shapes: B responses of this rank, R response tokens (right-padded). Log-probabilities and values are
undefined where `sequences.action_mask` is false, unless the record says otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.sequences import Sequences, tensors, wide
from rlhf_pipeline.rl.masking import masked_row_sums
from rlhf_pipeline.rl.rewards import kl_estimate

if TYPE_CHECKING:
    from rlhf_pipeline.episodes.partner import Episode


@dataclass(frozen=True)
class Rollout:
    """Prompts with their sampled responses."""

    sequences: Sequences
    logprobs: Tensor  # (B, R) float32: log pi(token) according to the sampler
    episodes: "Sequence[Episode] | None" = None  # B, if an answer can have several turns


@dataclass(frozen=True)
class TrainingPass:
    """Outputs of the models in training with their graphs, on the device.

    Their loss needs no other forward pass.
    """

    logprobs: Tensor  # (B, R)
    entropy: Tensor  # (B, R) nats
    values: Tensor | None  # (B, R); None without a critic


@dataclass(frozen=True)
class Scored:
    """A rollout with the outputs of the models, in main memory."""

    sequences: Sequences
    logprobs: Tensor  # (B, R) log pi_old(token), of the policy that sampled; NaN: by the update
    ref_logprobs: Tensor  # (B, R) log pi_ref(token); NaN if only the update asks the teacher
    values: Tensor | None  # (B, R) value of the state before each token; None without a critic
    scores: Tensor  # (B,) of the reward model, zeros without one; centred sum after `RewardSum`
    ended: Tensor  # (B,) bool: the response contains one of the EOS tokens
    parts: dict[str, Tensor] = field(default_factory=dict)
    """If several sources of rewards are summed: the centred scores of each, (B,), unweighted."""
    clipped_scores: Tensor | None = None  # (B,) scores of models clipped; None before `RewardSum`
    sampler_logprobs: Tensor | None = None  # (B, R) those of the `Rollout`
    training_pass: TrainingPass | None = None
    """The outputs of policy and critic with graphs, if scoring and the update share a pass."""
    replies: dict[str, float] = field(default_factory=dict)
    """Requests to chat models that score, their replies and tokens, by `name/count`."""
    episodes: "Sequence[Episode] | None" = None  # those of the `Rollout`

    @property
    def kl(self) -> Tensor:
        """(B,) KL of each response from the reference by the estimator k1, in nats."""
        log_ratios = kl_estimate(self.logprobs, self.ref_logprobs, "k1")
        return masked_row_sums(log_ratios, self.sequences.action_mask)

    def replaced(self, rows: Tensor, other: "Scored", others: Tensor) -> "Scored":
        """The same rollout with some rows replaced by those of another one."""
        index = torch.arange(len(self.sequences))
        index[rows] = len(index) + others
        sequences = self.sequences.joined(other.sequences).rows(index)
        width = sequences.response_ids.shape[1]

        def both(first: Tensor, second: Tensor) -> Tensor:
            found = wide(first, second)[index]
            return found if found.dim() == 1 else found[:, :width]

        changed: dict[str, Any] = {
            name: both(x, getattr(other, name)) for name, x in tensors(self).items()
        }
        parts = {name: both(x, other.parts[name]) for name, x in self.parts.items()}
        replies = {name: count + other.replies[name] for name, count in self.replies.items()}
        if self.episodes is not None and other.episodes is not None:
            played = [*self.episodes, *other.episodes]
            changed["episodes"] = [played[row] for row in index.tolist()]
        return replace(self, sequences=sequences, parts=parts, replies=replies, **changed)

    def with_values_plus(self, offset: float) -> "Scored":
        """The same rollout with a number added to every value."""
        assert self.values is not None
        done = self.training_pass
        if done is not None and done.values is not None:
            done = replace(done, values=done.values + offset)
        return replace(self, values=self.values + offset, training_pass=done)


def ended(sequences: Sequences, contract: TokenContract) -> Tensor:
    """Which responses end by themselves, (B,) bool: their last token is an EOS of the policy."""
    last = sequences.real_mask.sum(1, keepdim=True) - 1
    is_eos = torch.isin(sequences.response_ids, last.new_tensor(contract.eos_ids))
    return (is_eos & sequences.action_mask).gather(1, last.clamp(min=0)).squeeze(1)


def response_texts(answered: Rollout | Scored, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The responses without special tokens: of an episode, the last turn of the policy."""
    if answered.episodes is not None:
        return [episode.answer for episode in answered.episodes]
    ids = answered.sequences.response_ids
    found: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


@dataclass(frozen=True)
class Experience:
    """What actor and critic train on."""

    sequences: Sequences
    old_logprobs: Tensor | None  # (B, R); None if the update computes them
    advantages: Tensor  # (B, R); 0 with a teacher
    old_values: Tensor | None = None  # (B, R); None without a critic
    returns: Tensor | None = None  # (B, R), the critic's target; None without one
    ref_logprobs: Tensor | None = None  # (B, R), for the KL in the loss
    sampler_logprobs: Tensor | None = None  # (B, R); only to measure rounding
    training_pass: TrainingPass | None = None
    """The forward passes of all rows that the losses need, if scoring has made them."""
    given: bool = False  # demonstrations, which the policy has not sampled

    def rows(self, index: Tensor) -> Self:
        """Select rows, and drop the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        width = sequences.response_ids.shape[1]
        return self._with(sequences, lambda x: x[index, :width])

    def to(self, device: torch.device) -> Self:
        """Copy the rows to a device; the host does not wait for the copy."""
        moved = self.sequences.to(device)
        return self._with(moved, lambda x: x.to(device, non_blocking=True))

    def _with(self, sequences: Sequences, function: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: function(x) for name, x in tensors(self).items()}
        return replace(self, sequences=sequences, **changed)
