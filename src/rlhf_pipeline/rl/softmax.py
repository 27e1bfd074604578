"""The log-softmax in float32 of one chunk of positions after another, also from hidden states.

Shapes: B sequences, R response tokens, V vocabulary, d width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Head = tuple[Tensor, Tensor | None] | None
"""Weight (V, d) and bias (V,) of the layer from hidden states to logits; None: there are logits."""
Part = tuple[slice, slice]
"""Some rows and positions."""
CHUNK, GPU_CHUNK = 2**25, 2**27
"""Elements of a chunk: 128 MiB in float32 on a CPU, 512 MiB on a GPU, whose products of few rows
are slow. One tensor of a chunk exists at a time, and parts of others; two if the entropy has a
gradient."""


@dataclass(frozen=True)
class Softmax:
    """How logits become log-probabilities, a part of the positions at a time."""

    columns: int  # of the logits
    temperature: float
    vocab_size: int  # the first columns are those of real tokens
    chunk: int

    @classmethod
    def of(
        cls,
        logits: Tensor,
        ids: Tensor,
        head: Head,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        chunk: int | None = None,
    ) -> "Softmax":
        """The arguments and errors are those of `logprobs.logprobs_and_entropy`."""
        columns = logits.shape[-1] if head is None else head[0].shape[0]
        size = _checked_vocab_size(logits, columns, ids, temperature, vocab_size)
        chunk = chunk or (CHUNK if logits.device.type == "cpu" else GPU_CHUNK)
        return cls(columns, temperature, size, chunk)

    def log_softmax(self, inputs: Tensor, head: Head) -> Tensor:
        """The log-softmax of a part in float32, a new tensor; padded columns are left out."""
        size, (weight, bias) = self.vocab_size, head or (None, None)
        if weight is None:
            logits = inputs[..., :size].to(torch.float32, copy=True)
        else:
            logits = matmul(inputs, weight[:size].T)
            if bias is not None:
                logits += bias[:size]
        if self.temperature != 1:
            logits /= self.temperature
        return torch.log_softmax(logits, -1, out=logits)

    def parts(self, ids: Tensor) -> Iterator[Part]:
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


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32: bf16 is too coarse for the logits of a large vocabulary."""
    if left.is_cuda and left.dtype != torch.float32:
        product = torch.mm(left.flatten(0, -2), right, out_dtype=torch.float32)
        return product.view(*left.shape[:-1], -1)
    return left.float() @ right.float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to float32 numbers, without a second tensor of their size if torch can."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda and _adds_products(left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += matmul(left, right)


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


def _checked_vocab_size(
    logits: Tensor, columns: int, ids: Tensor, temperature: float, vocab_size: int | None
) -> int:
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
