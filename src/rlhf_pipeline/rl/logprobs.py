"""Log-probabilities of chosen tokens from logits, in float32, without a float32 copy of all the logits.

Shapes: B sequences, P prompt tokens, R response tokens, T = P + R, V vocabulary.

Logits come in the model's dtype, and B * R * V float32 numbers, several times over, are the largest tensors of RLHF.
So both reductions work on `chunk_rows` sequences at a time, and the backward pass computes a chunk's probabilities
again instead of keeping them.
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
    """Log-probability of each chosen token under the distribution it is sampled from.

        log softmax(logits / temperature)[ids]

    Args:
        logits: (B, R, V) in any float dtype; position t predicts ids[:, t].
        ids: (B, R) long, in [0, vocab_size) everywhere, padding included.
        temperature: the sampling temperature, so that ratios and KL are of the policy that acted.
        vocab_size: columns from here on, padding rows of the embedding, have probability 0; None = V.
        chunk_rows: sequences in a chunk; bounds peak memory, changes no result.

    Returns:
        (B, R) float32, differentiable once.

    Raises:
        ValueError: ids does not fit logits, temperature is not positive, or vocab_size is not in [1, V].
    """
    if ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids is {tuple(ids.shape)}, logits is {tuple(logits.shape)}; ids must lack only V"
        )
    vocab_size = _checked_vocab_size(logits, temperature, vocab_size)
    return _ChosenLogprobs.apply(logits, ids, temperature, vocab_size, chunk_rows)


def entropy_of(
    logits: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None, chunk_rows: int = 8
) -> Tensor:
    """Entropy of each position's distribution, -sum_v p_v log p_v, in nats.

    Arguments and errors are those of `logprobs_of`; logits must be finite.

    Returns:
        (B, R) float32, differentiable once.
    """
    vocab_size = _checked_vocab_size(logits, temperature, vocab_size)
    return _Entropy.apply(logits, temperature, vocab_size, chunk_rows)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones; 0 in left padding, which nothing attends to.

    Args:
        attention_mask: (B, T) bool or int, True = real token.

    Returns:
        (B, T) long.
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


class _ChosenLogprobs(torch.autograd.Function):
    """Autograd on its own would keep the float32 log-softmax of every chunk until the backward pass."""

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
    """As `_ChosenLogprobs`: what is kept are the logits, which that keeps too."""

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
    """The vocabulary size, with None resolved, once the arguments are known to make sense."""
    columns = logits.shape[-1]
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    if vocab_size is not None and not 1 <= vocab_size <= columns:
        raise ValueError(f"vocab_size is {vocab_size}; the logits have {columns} columns")
    return columns if vocab_size is None else vocab_size
