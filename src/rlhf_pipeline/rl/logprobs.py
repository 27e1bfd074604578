"""Log-probabilities, entropies and divergences in float32, without a float32 copy of all logits.

Shapes: B sequences, R response tokens, V vocabulary, d width.

Float32 tensors of B * R * V elements would be the largest ones of RLHF. Therefore one chunk of
positions is processed at a time, and the backward pass recomputes its probabilities.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK, GPU_CHUNK = 2**25, 2**27
"""Elements of a chunk: 128 MiB in float32 on a CPU, 512 MiB on a GPU, whose products of few rows
are slow. One tensor of a chunk exists at a time, and parts of others; two if the entropy has a
gradient."""

ENTROPY_PARTS = 8
TEACHER_PARTS = 8  # of a chunk: to compare two models, so many tensors exist at a time
BLOCK = 128  # tokens of the vocabulary whose probabilities are added up first
LEAST = 1e-30  # probability of all other tokens together if each of them has rounded to 0

Head = tuple[Tensor, Tensor | None] | None
"""Weight (V, d) and bias (V,) of the layer from hidden states to logits; None: there are logits."""


class Teacher(NamedTuple):
    """A teacher at the positions of a batch, and the `divergence` from it."""

    inputs: Tensor  # (B, R, d) hidden states of any width or (B, R, V) logits, without a gradient
    head: Head
    beta: float
    top_k: int | None = None


def logprobs_of(logits: Tensor, ids: Tensor, **how: Any) -> Tensor:
    """The first result of `logprobs_and_entropy`, with its arguments and errors."""
    return logprobs_and_entropy(logits, ids, with_entropy=False, **how)[0]


def logprobs_and_entropy(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int | None = None,
    head: Head = None,
    with_entropy: bool = True,
    teacher: Teacher | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of each chosen token under the sampled distribution, and its entropy in nats.

        log p = log softmax(logits / temperature)        log p[ids],  -sum_v p_v log p_v

    Args:
        logits: (B, R, V) in any float dtype; position t predicts ids[:, t]. With `head`, they are
            hidden states, (B, R, d). They must be finite for the entropy.
        ids: (B, R) long, in [0, vocab_size) everywhere, padding included.
        vocab_size: number of real tokens; columns beyond it have probability 0. None = V.
        chunk: elements processed at a time, at least one position; without effect on the result.
            None: the number for the device.
        head: weight (V, d) and bias (V,) of the layer from hidden states to logits, which exist
            for one chunk at a time, in float32 whatever the dtype of the weight.
        with_entropy: False: the second result is None.
        teacher: temperature and vocab_size are also those of its distributions.

    Returns:
        (B, R) float32 each, from one softmax, differentiable once. With a teacher also (2, B, R):
        the divergence from it, and its log-probability of each token, a constant.

    Raises:
        ValueError: the shape of ids, the temperature or vocab_size is wrong.
    """
    weight, bias = (None, None) if head is None else head
    columns = logits.shape[-1] if weight is None else weight.shape[0]
    if ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids is {tuple(ids.shape)}, logits is {tuple(logits.shape)}; "
            "expected (B, R) and (B, R, V)"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: found {temperature}, expected a positive number")
    vocab_size = columns if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= columns:
        raise ValueError(
            f"vocab_size: found {vocab_size}, expected 1 to {columns} (columns of logits)"
        )
    chunk = chunk or (CHUNK if logits.device.type == "cpu" else GPU_CHUNK)
    chunk = chunk if teacher is None else -(-chunk // TEACHER_PARTS)
    settings = _Settings(columns, temperature, vocab_size, chunk, with_entropy, teacher)
    found = _LogProbs.apply(logits, weight, bias, ids, settings)
    return found if teacher else found[:2]


def sampled(
    logits: Tensor, draws: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature) by inverting its CDF at given uniform numbers.

    Logits are (B, V), draws (B,) in [0, 1). Returns tokens (B,) long, and their log-probabilities
    (B,) float32. A temperature of 0 is greedy, with the log-probability at temperature 1.
    """
    scaled = logits[:, :vocab_size].float()
    if temperature not in (0, 1):
        scaled = scaled / temperature
    largest = scaled.amax(-1, keepdim=True)
    weights = (scaled - largest).exp_()
    # Sums of blocks in float64, then those within one block: the whole vocabulary in float64 would
    # be most of the time of a small model's token.
    blocks = torch.nn.functional.pad(weights, (0, -vocab_size % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    if temperature == 0:
        tokens = weights.argmax(-1, keepdim=True)
    else:
        place = draws[:, None] * total
        block = torch.searchsorted(ends, place, right=True).clamp(max=ends.shape[1] - 1)
        begin = ends.gather(1, block) - sums.gather(1, block)
        within = blocks.take_along_dim(block[:, :, None], 1).squeeze(1).double().cumsum(-1)
        offset = torch.searchsorted(begin + within, place, right=True).clamp(max=BLOCK - 1)
        # For logits that are not finite, the search ends behind the last token. The
        # log-probabilities of the response show the fault later. A check of each token would make
        # the device wait.
        tokens = (block * BLOCK + offset).clamp(max=vocab_size - 1)
    chosen = (scaled.gather(1, tokens) - largest).double() - total.log()
    return tokens.squeeze(1), chosen.float().squeeze(1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones; 0 in left padding.

    The mask is (B, T) bool or int, True = real token; positions are (B, T) long.
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def divergence(student: Tensor, teacher: Tensor, beta: float, top_k: int | None = None) -> Tensor:
    """The divergence of two distributions at each position, (...), in nats.

    Both are log-probabilities (..., V) in float32: log s of a student, log t of its teacher.

        beta = 0    KL(t || s) = sum_v t_v (log t_v - log s_v)     forward KL
        beta = 1    KL(s || t)                                     reverse KL
        otherwise   beta KL(t || m) + (1 - beta) KL(s || m)        m = beta t + (1 - beta) s

    With `top_k`, v are the k likeliest tokens of the teacher, and all others together as one more;
    this is at most the divergence of the whole vocabulary.

    Source: GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 2. That divergence
    goes to 0 with beta and with 1 - beta, where both KLs take its place, as in TRL 1.16.
    """
    if top_k is not None and top_k < teacher.shape[-1]:
        ids = teacher.topk(top_k, -1).indices
        student, teacher = _apart(student, ids), _apart(teacher, ids)
    if beta in (0, 1):
        first, second = (student, teacher) if beta else (teacher, student)
        return (first.exp() * (first - second)).sum(-1)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    both = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    return both.sum(-1)


def _apart(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The distribution of the tokens `ids` (..., K) and of all others together, (..., K + 1)."""
    rest = logprobs.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=LEAST)
    return torch.cat([logprobs.gather(-1, ids), rest.log()], -1)


class _LogProbs(torch.autograd.Function):
    """Recomputes a chunk's logits and its float32 log-softmax, which autograd would keep."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        ids: Tensor,
        settings: "_Settings",
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(inputs, weight, bias, ids)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs = inputs.new_empty(ids.shape, dtype=torch.float32)
        entropy = torch.empty_like(logprobs) if settings.with_entropy else None
        compared = logprobs.new_empty(2, *ids.shape) if settings.teacher else None
        for part in settings.parts(ids):
            log_p = settings.log_softmax(inputs[part], weight, bias)
            logprobs[part] = _chosen(log_p, ids[part])
            if compared is not None:
                compared[0, *part], log_t = settings.compare(log_p, part)
                compared[1, *part] = _chosen(log_t, ids[part])
                del log_t
            if entropy is not None:
                entropy[part] = _entropy(log_p)
            del log_p  # before the next chunk
        return logprobs, entropy, compared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, grad_compared: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradient of the results with respect to the inputs, the weight and the bias.

        d logprob / d logits = (onehot(id) - p) / temperature
        d entropy / d logits = -p * (log p + entropy) / temperature

        Autograd has that of the divergence with respect to log p.
        """
        inputs, weight, bias, ids = ctx.saved_tensors
        settings = ctx.settings
        grad_inputs = torch.zeros_like(inputs)
        needed = (
            weight if ctx.needs_input_grad[1] else None,
            bias if ctx.needs_input_grad[2] else None,
        )
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in needed]
        for part in settings.parts(ids):
            total = settings.log_softmax(inputs[part], weight, bias)
            factor = torch.zeros((), device=total.device)
            slope = None
            if grad_compared is not None:
                slope = settings.slope(total, part, grad_compared[0, *part])
            if grad_entropy is not None:
                scale = grad_entropy[part].unsqueeze(-1) / settings.temperature
                factor = -scale * (total + _entropy(total).unsqueeze(-1))
            total.exp_()
            if grad is not None:
                scale = grad[part].unsqueeze(-1) / settings.temperature
                total.mul_(factor - scale).scatter_add_(-1, ids[part].unsqueeze(-1), scale)
            else:
                total.mul_(factor)
            if slope is not None:
                total += slope
                del slope
            if weight is None:
                grad_inputs[part][..., : settings.vocab_size] = total
                del total
                continue
            grad_inputs[part] = total.to(inputs.dtype) @ weight[: settings.vocab_size]
            if sums[0] is not None:
                _add_product(
                    sums[0][: settings.vocab_size],
                    total.flatten(0, 1).T.to(inputs.dtype),
                    inputs[part].flatten(0, 1),
                )
            if sums[1] is not None:
                sums[1][: settings.vocab_size] += total.flatten(0, 1).sum(0)
            del total  # before the next chunk
        grads = [None if x is None else x.to(inputs.dtype) for x in sums]
        return grad_inputs, *grads, None, None


@dataclass(frozen=True)
class _Settings:
    """What `_LogProbs` needs besides tensors."""

    columns: int  # columns of the logits
    temperature: float
    vocab_size: int
    chunk: int
    with_entropy: bool
    teacher: Teacher | None

    def log_softmax(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The log-softmax of a part in float32, a new tensor; padded columns are left out."""
        size = self.vocab_size
        if weight is None:
            logits = inputs[..., :size].to(torch.float32, copy=True)
        else:
            logits = _matmul(inputs, weight[:size].T)
            if bias is not None:
                logits += bias[:size]
        if self.temperature != 1:
            logits /= self.temperature
        return torch.log_softmax(logits, -1, out=logits)

    def compare(self, log_p: Tensor, part: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """The divergence of a part from the teacher, and the teacher's log-softmax."""
        assert self.teacher is not None
        inputs, head, beta, top_k = self.teacher
        log_t = self.log_softmax(inputs[part], *(head or (None, None)))
        return divergence(log_p, log_t, beta, top_k), log_t

    def slope(self, log_p: Tensor, part: tuple[slice, slice], grad: Tensor) -> Tensor:
        """The gradient of the divergence with respect to the logits, times `grad`."""
        with torch.enable_grad():
            leaf = log_p.detach().requires_grad_()
            found, _ = self.compare(leaf, part)
            (slope,) = torch.autograd.grad(found, leaf, grad / self.temperature)
        return slope - log_p.exp().mul_(slope.sum(-1, keepdim=True))

    def parts(self, ids: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rows and positions of chunks: several whole rows, or else a part of one row.

        Slices are views; to flatten the logits of a batch could copy them.
        """
        rows, width = ids.shape
        positions = max(1, self.chunk // self.columns)
        height = max(1, positions // max(1, width))
        length = width if positions >= width else positions
        for top in range(0, rows, height):
            for left in range(0, width, max(1, length)):
                yield slice(top, top + height), slice(left, left + length)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32: bf16 is too coarse for the logits of a large vocabulary."""
    if left.is_cuda and left.dtype != torch.float32:
        product = torch.mm(left.flatten(0, -2), right, out_dtype=torch.float32)
        return product.view(*left.shape[:-1], -1)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to float32 numbers, without a second tensor of their size if torch can."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda and _adds_products(left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += _matmul(left, right)


@cache
def _adds_products(dtype: torch.dtype) -> bool:
    """Whether this torch adds a product in half precision to float32 numbers, in one kernel."""
    ones = torch.ones(8, 8, device="cuda", dtype=dtype)
    total = torch.ones(8, 8, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 9).all())


def _chosen(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _entropy(log_p: Tensor) -> Tensor:
    """The entropy of each position (B, R), a part of the positions at a time."""
    rows = log_p.flatten(0, 1)
    parts = rows.split(max(1, -(-len(rows) // ENTROPY_PARTS)))
    return -torch.cat([part.exp().mul_(part).sum(-1) for part in parts]).view(log_p.shape[:-1])
