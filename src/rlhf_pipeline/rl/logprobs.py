"""Log-probabilities and entropies from logits in float32, without a float32 copy of all logits.

Shapes: B sequences, P prompt tokens, R response tokens, T = P + R, V vocabulary.

Several float32 tensors of B * R * V elements would be the largest tensors of RLHF. Both reductions
therefore process `chunk_rows` sequences at a time, and the backward pass recomputes a chunk's
probabilities instead of keeping them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def logprobs_of(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_rows: int = 8,
) -> Tensor:
    """Log-probability of each chosen token under the sampled distribution.

        log softmax(logits / temperature)[ids]

    Args:
        logits: (B, R, V) in any float dtype; position t predicts ids[:, t].
        ids: (B, R) long, in [0, vocab_size) everywhere, padding included.
        temperature: the sampling temperature, so that ratios and KL belong to the sampling policy.
        vocab_size: number of real tokens; columns beyond it have probability 0. None = V.
        chunk_rows: sequences per chunk; limits peak memory without effect on the result.

    Returns:
        (B, R) float32, differentiable once.

    Raises:
        ValueError: ids does not match logits, temperature is not positive, or vocab_size is not in
            [1, V].
    """
    if ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids is {tuple(ids.shape)}, logits is {tuple(logits.shape)}; "
            "expected (B, R) and (B, R, V)"
        )
    vocab_size = _checked_vocab_size(logits, temperature, vocab_size)
    return _ChosenLogprobs.apply(logits, ids, temperature, vocab_size, chunk_rows)


def entropy_of(
    logits: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None, chunk_rows: int = 8
) -> Tensor:
    """Entropy of each position's distribution, -sum_v p_v log p_v, in nats.

    Arguments, result and errors are the same as in `logprobs_of`. Logits must be finite.
    """
    vocab_size = _checked_vocab_size(logits, temperature, vocab_size)
    return _Entropy.apply(logits, temperature, vocab_size, chunk_rows)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones; 0 in left padding.

    The mask is (B, T) bool or int, True = real token; positions are (B, T) long.
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


class _ChosenLogprobs(torch.autograd.Function):
    """Recomputes the float32 log-softmax, which autograd would keep for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, vocab_size: int, chunk_rows: int
    ) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.temperature, ctx.vocab_size, ctx.chunk_rows = temperature, vocab_size, chunk_rows
        chunks = zip(logits.split(chunk_rows), ids.unsqueeze(-1).split(chunk_rows), strict=True)
        logprobs = [
            _log_softmax(chunk, temperature, vocab_size).gather(-1, chosen)
            for chunk, chosen in chunks
        ]
        return torch.cat(logprobs).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d logprob / d logits = (onehot(id) - p) / temperature."""
        logits, ids = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        tensors = (logits, ids.unsqueeze(-1), grad.unsqueeze(-1) / ctx.temperature, grad_logits)
        for chunk, chosen, scale, target in zip(
            *(x.split(ctx.chunk_rows) for x in tensors), strict=True
        ):
            p = _log_softmax(chunk, ctx.temperature, ctx.vocab_size).exp()
            target[..., : ctx.vocab_size] = (-scale * p).scatter_add(-1, chosen, scale)
        return grad_logits, None, None, None, None


class _Entropy(torch.autograd.Function):
    """Keeps only the logits for the backward pass, like `_ChosenLogprobs`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperature: float, vocab_size: int, chunk_rows: int
    ) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.temperature, ctx.vocab_size, ctx.chunk_rows = temperature, vocab_size, chunk_rows
        log_ps = (
            _log_softmax(chunk, temperature, vocab_size) for chunk in logits.split(chunk_rows)
        )
        return torch.cat([_entropy(log_p) for log_p in log_ps])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """d H / d logits = -p * (log p + H) / temperature."""
        (logits,) = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        tensors = (logits, grad.unsqueeze(-1) / ctx.temperature, grad_logits)
        for chunk, scale, target in zip(*(x.split(ctx.chunk_rows) for x in tensors), strict=True):
            log_p = _log_softmax(chunk, ctx.temperature, ctx.vocab_size)
            target[..., : ctx.vocab_size] = (
                -scale * log_p.exp() * (log_p + _entropy(log_p).unsqueeze(-1))
            )
        return grad_logits, None, None, None


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _log_softmax(logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    return (logits[..., :vocab_size].float() / temperature).log_softmax(-1)


def _checked_vocab_size(logits: Tensor, temperature: float, vocab_size: int | None) -> int:
    """Check the arguments, and return the vocabulary size."""
    columns = logits.shape[-1]
    if not temperature > 0:
        raise ValueError(f"temperature: found {temperature}, expected a positive number")
    if vocab_size is not None and not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: found {vocab_size}, expected 1 to {columns} (columns of logits)"
        )
    return columns if vocab_size is None else vocab_size
