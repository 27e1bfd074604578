"""Log-probabilities and entropies from logits in float32, without a float32 copy of all logits.

Shapes: B sequences, R response tokens, V vocabulary, d width.

Float32 tensors of B * R * V elements would be the largest ones of RLHF. Therefore one chunk of
positions is processed at a time, and the backward pass recomputes its probabilities.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_pipeline.rl.divergences import Teacher, chosen
from rlhf_pipeline.rl.softmax import Head, Part, Softmax, add_product

ENTROPY_PARTS, TEACHER_PARTS = 8, 8
"""Parts of a chunk: of the entropy's tensors, and where several exist to compare two models."""
BLOCK = 128  # tokens of the vocabulary whose probabilities are added up first


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
        teacher: temperature, vocab_size and chunk are also those of its distributions.

    Returns:
        (B, R) float32 each, from one softmax, differentiable once. With a teacher also (2, B, R):
        `divergences.divergence` from it, and its log-probability of each token, a constant.

    Raises:
        ValueError: the shape of ids, the temperature or vocab_size is wrong.
    """
    softmax = Softmax.of(logits, ids, head, temperature, vocab_size, chunk)
    if teacher is not None:
        softmax = replace(softmax, chunk=-(-softmax.chunk // TEACHER_PARTS))
    weights = head or (None, None)
    found = _LogProbs.apply(logits, *weights, ids, softmax, teacher, with_entropy)
    return found[: 2 + (teacher is not None)]


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


class _LogProbs(torch.autograd.Function):
    """Recomputes a chunk's logits and its float32 log-softmax, which autograd would keep."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        ids: Tensor,
        softmax: Softmax,
        teacher: Teacher | None,
        with_entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(inputs, weight, bias, ids)
        ctx.softmax, ctx.teacher = softmax, teacher
        ctx.set_materialize_grads(False)
        head = None if weight is None else (weight, bias)
        logprobs = torch.empty_like(ids, dtype=torch.float32)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        compared = None if teacher is None else logprobs.new_empty(2, *ids.shape)
        for part in softmax.parts(ids):
            log_p = softmax.log_softmax(inputs[part], head)
            logprobs[part] = chosen(log_p, ids[part])
            if entropy is not None:
                entropy[part] = _entropy(log_p)
            if compared is not None:
                compared[:, *part] = torch.stack(teacher.compare(log_p, ids[part], softmax, part))
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
        """
        inputs, weight, bias, ids = ctx.saved_tensors
        softmax, head = ctx.softmax, None if weight is None else (weight, bias)
        grad_inputs = torch.zeros_like(inputs)
        needed = (
            weight if ctx.needs_input_grad[1] else None,
            bias if ctx.needs_input_grad[2] else None,
        )
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in needed]
        for part in softmax.parts(ids):
            total = softmax.log_softmax(inputs[part], head)
            factor = torch.zeros((), device=total.device)
            of_teacher = None
            if grad_compared is not None:
                scale = grad_compared[0, *part] / softmax.temperature
                of_teacher = _slope(ctx.teacher, total, ids[part], softmax, part, scale)
            if grad_entropy is not None:
                scale = grad_entropy[part].unsqueeze(-1) / softmax.temperature
                factor = -scale * (total + _entropy(total).unsqueeze(-1))
            total.exp_()
            if grad is not None:
                scale = grad[part].unsqueeze(-1) / softmax.temperature
                total.mul_(factor - scale).scatter_add_(-1, ids[part].unsqueeze(-1), scale)
            else:
                total.mul_(factor)
            if of_teacher is not None:
                total += of_teacher
                del of_teacher
            if weight is None:
                grad_inputs[part][..., : softmax.vocab_size] = total
                del total
                continue
            grad_inputs[part] = total.to(inputs.dtype) @ weight[: softmax.vocab_size]
            if sums[0] is not None:
                add_product(
                    sums[0][: softmax.vocab_size],
                    total.flatten(0, 1).T.to(inputs.dtype),
                    inputs[part].flatten(0, 1),
                )
            if sums[1] is not None:
                sums[1][: softmax.vocab_size] += total.flatten(0, 1).sum(0)
            del total  # before the next chunk
        grads = [None if x is None else x.to(inputs.dtype) for x in sums]
        return grad_inputs, *grads, *[None] * 4


def _entropy(log_p: Tensor) -> Tensor:
    """The entropy of each position (B, R), a part of the positions at a time."""
    rows = log_p.flatten(0, 1)
    parts = rows.split(max(1, -(-len(rows) // ENTROPY_PARTS)))
    return -torch.cat([part.exp().mul_(part).sum(-1) for part in parts]).view(log_p.shape[:-1])


def _slope(
    teacher: Teacher, log_p: Tensor, ids: Tensor, softmax: Softmax, part: Part, scale: Tensor
) -> Tensor:
    """`scale` times the gradient of the divergence with respect to logits at temperature 1."""
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        found, _ = teacher.compare(leaf, ids, softmax, part)
        (slope,) = torch.autograd.grad(found, leaf, scale)
    return slope - log_p.exp().mul_(slope.sum(-1, keepdim=True))
