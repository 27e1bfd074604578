"""Log-probabilities and entropies from logits in float32, without a float32 copy of all logits.

Shapes: B sequences, P prompt tokens, R response tokens, T = P + R, V vocabulary.

Several float32 tensors of B * R * V elements would be the largest tensors of RLHF. Therefore one
chunk of positions is processed at a time, and the backward pass recomputes a chunk's probabilities
instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**25
"""Elements of a chunk: 128 MiB in float32. Three or four tensors of a chunk exist at a time."""


def logprobs_of(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Log-probability of each chosen token under the sampled distribution.

        log softmax(logits / temperature)[ids]

    Args:
        logits: (B, R, V) in any float dtype; position t predicts ids[:, t].
        ids: (B, R) long, in [0, vocab_size) everywhere, padding included.
        temperature: the sampling temperature, so that ratios and KL belong to the sampling policy.
        vocab_size: number of real tokens; columns beyond it have probability 0. None = V.
        chunk: elements processed at a time, at least one position; without effect on the result.

    Returns:
        (B, R) float32, differentiable once.

    Raises:
        ValueError: ids does not match logits, temperature is not positive, or vocab_size is not in
            [1, V].
    """
    vocab_size = _checked_vocab_size(logits, ids, temperature, vocab_size)
    logprobs, _ = _LogProbs.apply(logits, ids, temperature, vocab_size, chunk, False)
    return logprobs


def logprobs_and_entropy(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`logprobs_of`, and the entropy of each position's distribution: -sum_v p_v log p_v, in nats.

    Both are (B, R) float32 from one softmax. Logits must be finite for the entropy.
    """
    vocab_size = _checked_vocab_size(logits, ids, temperature, vocab_size)
    return _LogProbs.apply(logits, ids, temperature, vocab_size, chunk, True)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones; 0 in left padding.

    The mask is (B, T) bool or int, True = real token; positions are (B, T) long.
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


class _LogProbs(torch.autograd.Function):
    """Recomputes the float32 log-softmax, which autograd would keep for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        vocab_size: int,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(logits, ids)
        ctx.temperature, ctx.vocab_size, ctx.chunk = temperature, vocab_size, chunk
        ctx.set_materialize_grads(False)
        logprobs = logits.new_empty(ids.shape, dtype=torch.float32)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for part in _parts(logits, chunk):
            log_p = _log_softmax(logits[part], temperature, vocab_size)
            logprobs[part] = log_p.gather(-1, ids[part].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                entropy[part] = _entropy(log_p)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        """The gradient of both results with respect to the logits.

        d logprob / d logits = (onehot(id) - p) / temperature
        d entropy / d logits = -p * (log p + entropy) / temperature
        """
        logits, ids = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for part in _parts(logits, ctx.chunk):
            log_p = _log_softmax(logits[part], ctx.temperature, ctx.vocab_size)
            total = torch.zeros_like(log_p)
            if grad is not None:
                scale = grad[part].unsqueeze(-1) / ctx.temperature
                total = (-scale * log_p.exp()).scatter_add_(-1, ids[part].unsqueeze(-1), scale)
            if grad_entropy is not None:
                scale = grad_entropy[part].unsqueeze(-1) / ctx.temperature
                total -= scale * log_p.exp() * (log_p + _entropy(log_p).unsqueeze(-1))
            grad_logits[part][..., : ctx.vocab_size] = total
        return grad_logits, None, None, None, None, None


def _parts(logits: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Rows and positions of chunks: several whole rows, or else a part of one row.

    Slices are views. To flatten the logits of a batch could copy them: they may be a view.
    """
    rows, width, vocabulary = logits.shape
    positions = max(1, chunk // vocabulary)
    height = max(1, positions // max(1, width))
    length = width if positions >= width else positions
    for top in range(0, rows, height):
        for left in range(0, width, max(1, length)):
            yield slice(top, top + height), slice(left, left + length)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _log_softmax(logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    return (logits[..., :vocab_size].float() / temperature).log_softmax(-1)


def _checked_vocab_size(
    logits: Tensor, ids: Tensor, temperature: float, vocab_size: int | None
) -> int:
    """Check the arguments, and return the vocabulary size."""
    columns = logits.shape[-1]
    if ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids is {tuple(ids.shape)}, logits is {tuple(logits.shape)}; "
            "expected (B, R) and (B, R, V)"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: found {temperature}, expected a positive number")
    if vocab_size is not None and not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: found {vocab_size}, expected 1 to {columns} (columns of logits)"
        )
    return columns if vocab_size is None else vocab_size
