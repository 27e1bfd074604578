"""Which rows a step trains on, and which of them are this rank's: pure functions of step, seed and rank."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError


def load_rows(path: Path, world: World) -> pa.Table:
    """A prepared table, memory-mapped; raise `ArtifactError` where a rank would be left without a row."""
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    if table.num_rows < world.size:
        raise ArtifactError(
            f"{path} has {table.num_rows} rows for {world.size} ranks; give the split more data, or its phase a greater share "
            "(split.weights, split.validation_fraction)"
        )
    return table


def columns(table: pa.Table, rows: np.ndarray) -> dict[str, list[Any]]:
    """The chosen rows, in that order, as Python values by column."""
    return dict(table.take(pa.array(rows)).to_pydict())


def step_rows(count: int, batch_size: int, step: int, seed: int, *, stream: int = 0) -> np.ndarray:
    """Row numbers of the global batch of `step` (from 0), out of `count` rows in a stream of seeded permutations.

    Each permutation is a pass over the data; a batch may reach from one pass into the next, so none is short. Tables that
    are read side by side have a `stream` each.
    """
    position = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([_order(count, seed, int(p // count), stream)[p % count] for p in position])


def own_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This rank's rows of a global batch: every `world.size`-th. Any block whose size the world divides is shared evenly."""
    return rows[world.rank :: world.size]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, stream]).permutation(count)
