"""Matrix products on this CPU: how long they take, what they compute, and what the peak is.

Attention's own products are left out: the shapes do not say how much of them a mask saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent

FACTORS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "mkldnn::_linear_pointwise": 0,
}
"""The operators, and the argument that is the first factor; the second factor follows it."""


@dataclass
class Products:
    """The matrix products of a block."""

    seconds: float = 0.0
    operations: int = 0
    """Multiplications and additions."""


@contextmanager
def recorded(table: Path) -> Iterator[Products]:
    """Record the products of the block; they are known at its end.

    The file `table` then contains the seconds of all operators.
    """
    products = Products()
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], record_shapes=True) as profile:
        yield products
    averages = profile.key_averages()
    table.write_text(averages.table("self_cpu_time_total", row_limit=60, max_name_column_width=60))
    for event in profile.events() or []:
        if event.name in FACTORS:
            products.seconds += event.self_cpu_time_total / 1e6
            products.operations += operations(event)


def operations(event: FunctionEvent) -> int:
    """2 M N K for factors (..., M, K) and (..., K, N); the weight of a linear layer is (N, K)."""
    first = FACTORS[event.name]
    left, right = event.input_shapes[first : first + 2]
    columns = right[0] if event.name == "mkldnn::_linear_pointwise" else right[-1]
    return 2 * math.prod(left) * columns


def peak(dtype: torch.dtype, size: int = 1536, repetitions: int = 20) -> float:
    """Operations per second of the fastest of some products of square matrices."""
    factor = torch.rand(size, size).to(dtype)
    fastest = math.inf
    for _ in range(repetitions):
        began = time.perf_counter()
        factor @ factor
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest
