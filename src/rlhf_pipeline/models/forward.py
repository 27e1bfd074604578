"""Forward passes over prompts and responses, reduced to one number per response token.

Training, scoring and evaluation use the same functions, so every log-probability has the same
temperature, vocabulary and positions.

A forward pass avoids two things: padding, and a tensor of all logits. Whether a model can do
without depends on the code of its family, which may come from its authors. So tiny forward passes
decide before its first use (`probe_capabilities`).

Shapes: B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

import logging
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.models.packing import PACKED
from rlhf_pipeline.models.sequences import Packed, Sequences, collate
from rlhf_pipeline.rl.logprobs import Head, Teacher, logprobs_and_entropy, logprobs_of

FIRST, SECOND, THIRD = [1, 2, 3], [4, 5, 6, 7, 8], [4, 5, 6, 9, 10, 11]
"""Token ids of three short rows; the last two begin with a prompt of three tokens."""


@dataclass(frozen=True)
class LogprobRequest:
    """A request to a forward pass: to return log-probabilities instead of logits, or to keep what a
    teacher's are made of."""

    ids: Tensor
    """(B, R) the chosen tokens; token t is predicted by the t-th hidden state that is kept."""
    vocab_size: int
    temperature: float = 1.0
    with_entropy: bool = False
    entropy_trains: bool = False
    """Whether the entropies have a gradient, which costs as much as that of log-probabilities."""
    teacher: Teacher | None = None
    """With entropies: a teacher to be compared with."""
    keep: list[tuple[Tensor, Head]] | None = None
    """Where a teacher's pass puts hidden states or logits, and the layer behind them."""

    def answer(self, inputs: Tensor, head: Head = None) -> Tensor:
        """Log-probabilities, entropies if requested, divergences from a teacher and its own
        log-probabilities, (1, 2 or 4, B, R) float32.

        `inputs` are logits, or with `head` hidden states; they may have more columns than `ids`.
        """
        how: Any = {"temperature": self.temperature, "vocab_size": self.vocab_size, "head": head}
        inputs = inputs[:, : self.ids.shape[1]]
        if self.keep is not None:
            if head is not None:  # sharded weights are whole now, and stay as long as they are used
                head = head[0].detach(), head[1] if head[1] is None else head[1].detach()
            self.keep.append((inputs, head))
            return inputs
        if not self.with_entropy:
            return logprobs_of(inputs, self.ids, **how)[None]
        found = logprobs_and_entropy(inputs, self.ids, teacher=self.teacher, **how)
        logprobs, entropy, *compared = found
        logprobs = logprobs.detach() if compared else logprobs
        entropy = entropy if self.entropy_trains else entropy.detach()
        return torch.cat([logprobs[None], entropy[None], *compared])


class LogprobHead(nn.Linear):
    """A linear layer from hidden states to logits; with a request, to log-probabilities.

    The model itself calls the layer, so DeepSpeed gathers a sharded weight for it, forward and
    backward, tied to the embeddings or not.
    """

    request: LogprobRequest | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (B, S, V), or the answer to the request."""
        if self.request is None:
            return super().forward(hidden)
        return self.request.answer(hidden, (self.weight, self.bias))


@dataclass(frozen=True)
class Capabilities:
    """What a model's forward pass can do."""

    packed: bool  # process the rows of a batch one after another, without padding
    head: LogprobHead | None
    """The layer that can return log-probabilities; None: they are computed from all logits."""


_PROBED: WeakKeyDictionary[PreTrainedModel, Capabilities] = WeakKeyDictionary()


def install_logprob_head(model: PreTrainedModel) -> None:
    """Turn the model's output layer into a `LogprobHead` if it is linear; names stay."""
    head = cast(nn.Module | None, model.get_output_embeddings())
    if type(head) is nn.Linear:
        head.__class__ = LogprobHead


def probe_capabilities(policy: nn.Module) -> Capabilities:
    """Try what a model, an engine or a model with scalars can do; a model is tried once.

    All ranks call this together.
    """
    model = network_of(policy)
    if model not in _PROBED:
        _PROBED[model] = Capabilities(_packs(policy, model), _logprob_head(policy, model))
    return _PROBED[model]


def warn_of_padding(model: nn.Module) -> None:
    """Warn if a model computes padding as well. All ranks call this together."""
    if not probe_capabilities(model).packed:
        logging.getLogger(__name__).warning(
            "%s: found a model that computes padding, too; batches contain rows of similar length",
            type(network_of(model)).__name__,
        )


def response_logprobs(
    policy: nn.Module, batch: Sequences, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each response token, (B, R) float32; undefined in padding."""
    return _logprobs(policy, batch, vocab_size=vocab_size, temperature=temperature)[0]


def response_logprobs_and_entropy(
    policy: nn.Module, batch: Sequences, *, entropy_trains: bool = True, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return each response token's log-probability and its distribution's entropy, (B, R) each.

    `how` is `vocab_size` and `temperature`; `entropy_trains`: whether the entropy has a gradient.
    """
    found = _logprobs(policy, batch, with_entropy=True, entropy_trains=entropy_trains, **how)
    return found[0], found[1]


def response_divergences(
    student: nn.Module,
    teacher: nn.Module,
    batch: Sequences,
    *,
    beta: float,
    top_k: int | None = None,
    entropy_trains: bool = False,
    **how: Any,
) -> tuple[Tensor, ...]:
    """Return the results of `response_logprobs_and_entropy` for the student, the divergence from
    the teacher at each response token, and the teacher's log-probability of it, (B, R) each.

    `beta` and `top_k` are those of `rl.logprobs`. Log-probabilities have no gradient.
    """
    packed = all(probe_capabilities(each).packed for each in (student, teacher))
    kept: list[tuple[Tensor, Head]] = []
    with torch.no_grad():
        _logprobs(teacher, batch, packed=packed, keep=kept, **how)
    known = Teacher(*kept[0], beta, top_k)
    wanted = {"with_entropy": True, "entropy_trains": entropy_trains, "teacher": known}
    return _logprobs(student, batch, packed=packed, **wanted, **how).unbind()


def response_values(critic: nn.Module, batch: Sequences) -> Tensor:
    """Return the value of the state before each response token, (B, R) float32."""
    values: Tensor
    if probe_capabilities(critic).packed:
        packed = batch.packed()
        values = critic(**packed.model_inputs(), scores_to_keep=packed.before_response)
        return _rectangular(values, batch)
    values = critic(**batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1] + 1)
    return values[:, :-1]


def sequence_scores(reward_model: nn.Module, batch: Sequences) -> Tensor:
    """Return each response's score, (B,) float32: the scalar at its last real token."""
    if probe_capabilities(reward_model).packed:
        packed = batch.packed()
        scores: Tensor = reward_model(**packed.model_inputs(), scores_to_keep=packed.ends)
        return scores[0]
    scores = reward_model(**batch.model_inputs(), scores_to_keep=batch.response_ids.shape[1])
    last = batch.real_mask.sum(1, keepdim=True) - 1
    return scores.gather(1, last).squeeze(1)


def network_of(policy: nn.Module) -> PreTrainedModel:
    """The Hugging Face model in a model, an engine or a model with scalars."""
    return next(part for part in policy.modules() if isinstance(part, PreTrainedModel))


def _logprobs(
    policy: nn.Module, batch: Sequences, *, packed: bool | None = None, **wanted: Any
) -> Tensor:
    """What the request returns, (1, 2 or 4, B, R). `packed`: None if the policy can pack rows."""
    able = probe_capabilities(policy)
    packed = able.packed if packed is None else packed
    rows = batch.packed() if packed else batch
    ids = rows.response_ids
    # Padded: the last prompt token and every response token; the last one predicts nothing.
    keep = rows.before_response if isinstance(rows, Packed) else ids.shape[1] + 1
    request = LogprobRequest(ids, **wanted)
    found = _requested(policy, able.head, request, **rows.model_inputs(), logits_to_keep=keep)
    return _rectangular(found, batch) if packed and request.keep is None else found


def _requested(
    policy: nn.Module, head: LogprobHead | None, request: LogprobRequest, **inputs: Any
) -> Tensor:
    """A forward pass of the policy in which its head answers the request."""
    if head is None:
        return request.answer(policy(**inputs, use_cache=False).logits)
    head.request = request
    try:
        found: Tensor = policy(**inputs, use_cache=False).logits
    finally:
        head.request = None
    return found


def _rectangular(values: Tensor, batch: Sequences) -> Tensor:
    """The values (..., 1, M) of all response tokens at their places, (..., B, R); 0 elsewhere."""
    mask = batch.real_mask.expand(*values.shape[:-2], *batch.real_mask.shape)
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


@torch.no_grad()
def _packs(policy: nn.Module, model: PreTrainedModel) -> bool:
    """Whether packed rows have the outputs that they have alone, also if they share a prompt.

    Rounding is allowed: a root mean square of a tenth of what the first row would change as the
    beginning of the second. The largest difference says less, because a pretrained model in bf16
    can enlarge the rounding of a single token to a fifth of that.
    """
    if model.config._attn_implementation != PACKED:
        return False
    rows = FIRST, SECOND, THIRD
    batch = collate([r[:3] for r in rows], [r[3:] for r in rows], 0, prompt_numbers=[0, 1, 1])
    packed = outputs(policy, model, **batch.to(model.device).packed().model_inputs())
    second, third, mixed = (
        outputs(policy, model, input_ids=torch.tensor([ids], device=model.device))
        for ids in (SECOND, THIRD, FIRST + SECOND)
    )
    alone = torch.cat([second, third[3:]])
    error = (packed[len(FIRST) :] - alone).square().mean().sqrt()
    leak = (mixed[len(FIRST) :] - second).square().mean().sqrt()
    return bool(error <= 0.1 * leak)


@torch.no_grad()
def _logprob_head(policy: nn.Module, model: PreTrainedModel) -> LogprobHead | None:
    """The model's output layer if the model returns its result unchanged.

    Some families scale or cap their logits afterwards.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, LogprobHead):
        return None
    ids = torch.tensor([FIRST], device=model.device)
    own: list[Tensor] = []
    hook = head.register_forward_hook(lambda _, __, output: own.append(output))
    try:
        found = _requested(policy, head, LogprobRequest(ids, head.out_features), input_ids=ids)
    finally:
        hook.remove()
    return head if torch.equal(found, own[0]) else None


def outputs(policy: nn.Module, model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Logits (T, V) or scalars (T, 1) of one row."""
    if model.get_output_embeddings() is None:
        count = inputs["input_ids"].shape[1]
        return policy(**inputs, scores_to_keep=count)[0, :, None]
    return policy(**inputs, use_cache=False).logits[0].float()
