"""The rows of each step and each rank: pure functions of step, seed and rank."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError


def load_rows(path: Path, world: World) -> pa.Table:
    """A prepared table, memory-mapped.

    Raises:
        ArtifactError: the table has fewer rows than there are ranks.
    """
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    if table.num_rows < world.size:
        raise ArtifactError(
            f"{path}: found {table.num_rows} rows, expected at least {world.size}, one for each "
            "rank. Fix: add data, or give the phase a larger share (split.weights, "
            "split.validation_fraction)"
        )
    return table


def columns(table: pa.Table, rows: np.ndarray) -> dict[str, list[Any]]:
    """The chosen rows, in the given order, as Python values by column."""
    return dict(table.take(pa.array(rows)).to_pydict())


def step_rows(count: int, batch_size: int, step: int, seed: int, *, stream: int = 0) -> np.ndarray:
    """Row numbers of the global batch of `step` (from 0), from a stream of seeded permutations.

    Each permutation of the `count` rows is a pass over the data. A batch may span two passes, so no
    batch is short. Tables that are read in parallel need different values of `stream`.
    """
    position = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([_order(count, seed, int(p // count), stream)[p % count] for p in position])


def own_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This rank's rows of a global batch: every `world.size`-th row.

    Every block of rows whose size is a multiple of `world.size` is therefore shared evenly.
    """
    return rows[world.rank :: world.size]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, stream]).permutation(count)
