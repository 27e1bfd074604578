"""Products of float32 matrices by oneDNN instead of MKL, on AMD's processors since Zen 5.

torch asks MKL for them, which uses AVX-512 on Intel's processors only. With torch 2.13, a product
of 2048 x 768 and 768 x 3072 runs at 226 instead of 102 GFLOP/s on a core of a Zen 5; on a Zen 4, an
iteration of PPO or GRPO gains nothing.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LEAST = 2**20
"""Multiplications of the smallest product that oneDNN computes. Each of its calls takes some ten
microseconds more; smaller products take four more, because they pass through this file."""
THINNEST = 8  # rows or columns; products with a vector wait for memory

_library: torch.library.Library | None = None


def prefers_onednn(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN is faster here, by Linux's description of the processor: an AMD Zen 5, whose
    arithmetic has 512 bits. Zen 4 computes 512 bits in two halves, and gains nothing."""
    if not cpuinfo.is_file() or not torch.backends.mkl.is_available():
        return False
    text = cpuinfo.read_text(encoding="utf-8")
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    is_zen_5 = "AuthenticAMD" in text and family is not None and int(family[1]) >= 26
    return is_zen_5 and re.search(r"\bavx512f\b", text) is not None


def uses_onednn() -> bool:
    """Whether this process multiplies by oneDNN."""
    return _library is not None


def use_onednn(wanted: bool) -> None:
    """Multiply by oneDNN from now on in this process, or as torch does.

    torch's operators `mm` and `addmm` are replaced, so that layers, heads and all their gradients
    have the same kernels. Models compiled by torch do not call these operators.
    """
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    if wanted and torch.backends.mkldnn.is_available():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that an operator is replaced
            _library.impl("mm", _mm, "CPU")
            _library.impl("addmm", _addmm, "CPU")


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _is_large(left, right):
        return _by_onednn(left, right, None)
    return torch.ops.aten.mm.out(left, right, out=left.new_empty(0))


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    is_bias = bias.shape == right.shape[1:] and bias.is_contiguous() and bias.dtype == right.dtype
    if _is_large(left, right) and beta == alpha == 1 and is_bias:
        return _by_onednn(left, right, bias)
    out = left.new_empty(0)
    return torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=out)


def _is_large(left: Tensor, right: Tensor) -> bool:
    (rows, inner), columns = left.shape, right.shape[-1]
    return (
        left.dtype is right.dtype is torch.float32
        and rows * inner * columns >= LEAST
        and min(rows, inner, columns) >= THINNEST
        and inner == len(right)
        and all(x.is_contiguous() or x.t().is_contiguous() for x in (left, right))
    )


def _by_onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise.default
    return operator(left, right.t(), bias, "none", [], "")
