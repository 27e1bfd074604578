"""The rows of each step, rank and micro batch: pure functions of step, seed, rank and lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_pipeline.data.record_files import mapped
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import probe_capabilities
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime import heartbeat

ROUNDS = 8
"""Rounds of the Feistel network in `shuffled`; four already look random for large tables."""


@dataclass(frozen=True)
class Rows:
    """A prepared table, memory-mapped. Reading rows copies these rows and nothing else."""

    batches: list[pa.RecordBatch]
    ends: np.ndarray  # for each batch, the number of rows up to its end

    @classmethod
    def of(cls, table: pa.Table) -> "Rows":
        batches = table.to_batches()
        return cls(batches, np.cumsum([batch.num_rows for batch in batches], dtype=np.int64))

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """The rows of a file; raises ArtifactError if it is damaged."""
        return cls.of(mapped(path))

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def columns(self, rows: np.ndarray) -> dict[str, list[Any]]:
        """The chosen rows, in the given order, as Python values by column."""
        batches = np.searchsorted(self.ends, rows, side="right")
        places = rows - np.concatenate([[0], self.ends])[batches]
        pairs = zip(batches.tolist(), places.tolist(), strict=True)
        chosen = [self.batches[batch].slice(row, 1) for batch, row in pairs]
        return dict(pa.Table.from_batches(chosen).to_pydict())

    def longest(self, column: str) -> int:
        """The length of the longest list in a column."""
        return max(pc.max(pc.list_value_length(batch[column])).as_py() for batch in self.batches)


def load_rows(path: Path, world: World, read: Callable[[Path], Rows] = Rows.read) -> Rows:
    """A prepared table. Raises ArtifactError if the table has fewer rows than there are ranks."""
    if (table := read(path)).num_rows < world.size:
        raise ArtifactError(
            f"{path}: found {table.num_rows} rows, expected at least {world.size}, one for each "
            "rank. Fix: add data, or give the phase a larger share (split.weights, "
            "split.validation_fraction, split.test_fraction, evaluate.judge_model)"
        )
    return table


def step_rows(count: int, batch_size: int, step: int, seed: int, *, stream: int = 0) -> np.ndarray:
    """Row numbers of the global batch of `step` (from 0), from a stream of seeded permutations.

    Each permutation of the `count` rows is a pass over the data; a batch may span two. Tables that
    are read in parallel need different values of `stream`.
    """
    return rows_at(np.arange(step * batch_size, (step + 1) * batch_size), count, seed, stream)


def rows_at(positions: np.ndarray, count: int, seed: int, stream: int = 0) -> np.ndarray:
    """Row numbers at some positions of such a stream."""
    numbers, places = np.divmod(positions, count)
    passes = [(number, places[numbers == number]) for number in np.unique(numbers)]
    return np.concatenate([shuffled(own, count, (seed, int(n), stream)) for n, own in passes])


def sampled_rows(count: int, size: int, seed: int) -> np.ndarray:
    """Row numbers of a random sample of at most `size` of `count` rows, in ascending order."""
    return np.sort(shuffled(np.arange(min(size, count)), count, (seed,)))


def own_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This rank's rows of a global batch: every `world.size`-th row."""
    return rows[world.rank :: world.size]


def minibatch_rows(count: int, size: int, world: World, key: tuple[int, ...]) -> np.ndarray:
    """This rank's rows in each minibatch of a pass over the `count` rows of a global batch.

    Returns positions in the rank's share, (minibatches, rows), drawn by `key`. Rows change places
    only if their numbers differ by a multiple of `size`, so each minibatch is shared evenly, and is
    the same for any number of ranks.
    """
    rows = np.arange(count).reshape(-1, size)
    drawn = np.random.default_rng(list(key)).permuted(rows, axis=0)
    return drawn[:, world.rank :: world.size] // world.size


def even_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This rank's rows, equally many on each rank for ZeRO-3: the first row fills the gaps."""
    missing = -len(rows) % world.size
    return own_share(np.concatenate([rows, np.repeat(rows[:1], missing)]), world)


def shuffled(positions: np.ndarray, count: int, key: tuple[int, ...]) -> np.ndarray:
    """The numbers at some positions of a random permutation of range(count), chosen by `key`.

    The permutation is computed, not stored: a table of 10^8 rows would need an array of 0.8 GB on
    each rank. A Feistel network permutes the numbers of an even count of bits, with the finalizer
    of SplitMix64 (Steele et al. 2014) as its function; a result outside the range is permuted again
    until it is inside (cycle walking, Black and Rogaway 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng(list(key)).integers(2**64, size=ROUNDS, dtype=np.uint64)
    shift, mask = np.uint64(half), np.uint64(2**half - 1)

    def permuted(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> shift, numbers & mask
        for each in keys:
            mixed = right ^ each
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            left, right = right, left ^ (mixed & mask)
        return (left << shift) | right

    numbers = permuted(positions.astype(np.uint64))
    while (outside := numbers >= count).any():
        numbers[outside] = permuted(numbers[outside])
    return numbers.astype(np.int64)


def micro_batches(
    lengths: Sequence[Tensor], tokens: int, model: nn.Module, world: World
) -> list[list[Tensor]]:
    """Divide each batch into groups of row numbers with at most `tokens` tokens each.

    All ranks make equally many groups of a batch: ZeRO needs every rank in every forward pass. One
    collective decides for all batches. A longer row is a group of its own; the model decides
    whether padding counts. `lengths` are those of `grouped` for each batch, N on each rank.
    """
    padded = not probe_capabilities(model).packed
    groups = [grouped(own, tokens, padded=padded) for own in lengths]
    counts = world.most([len(found) for found in groups])
    return [split(found, count) for found, count in zip(groups, counts, strict=True)]


def grouped(lengths: Tensor, tokens: int, *, padded: bool) -> list[Tensor]:
    """Fill groups with rows from the longest to the shortest.

    The first group is the largest: if memory does not suffice, it shows at once. `lengths` are
    (N, S, 2), the tokens of prompt and response in the S sequences of each row. With `padded`, all
    sequences of a group are as wide as its longest prompt and its longest response together.
    """
    totals, widths = lengths.sum((1, 2)), lengths.amax(1).tolist()
    sizes = totals.tolist()
    groups: list[list[int]] = []
    total = prompt = response = 0
    for row in totals.argsort(descending=True, stable=True).tolist():
        total += sizes[row]
        prompt, response = max(prompt, widths[row][0]), max(response, widths[row][1])
        count = lengths.shape[1] * (len(groups[-1]) + 1) if groups else 0
        if not groups or (count * (prompt + response) if padded else total) > tokens:
            groups.append([])
            total, (prompt, response) = sizes[row], widths[row]
        groups[-1].append(row)
    return [torch.tensor(group) for group in groups]


def split(groups: list[Tensor], count: int) -> list[Tensor]:
    """Split the groups of most rows until there are `count` groups."""
    groups = list(groups)
    while len(groups) < count:
        most = max(range(len(groups)), key=lambda number: len(groups[number]))
        groups[most : most + 1] = groups[most].split((len(groups[most]) + 1) // 2)
    return groups


def by_micro_batches(
    function: Callable[[nn.Module, Sequences], Tensor],
    model: nn.Module,
    sequences: Sequences,
    tokens: int,
    world: World,
) -> Tensor:
    """Apply a model by a function that returns (b,) or (b, r) to micro batches of rows.

    All ranks call this together, with equally many rows. Returns (B,) or (B, R) float32 on the CPU,
    in the order of the rows, padded with zeros.
    """
    (groups,) = micro_batches([sequences.lengths], tokens, model, world)
    parts, width = [], sequences.response_ids.shape[1]
    for index in groups:
        part = function(model, sequences.rows(index).to(world.device)).float()
        parts.append(part if part.dim() == 1 else pad(part, (0, width - part.shape[1])))
        heartbeat.report_progress()
    # The host waits for the device here and nowhere above.
    return torch.cat(parts).cpu()[torch.cat(groups).argsort()]
