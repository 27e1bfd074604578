"""Which row of which source goes to which part: how much of a source is used, what repeats an earlier one, and the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data.parts import PARTS, Part, assign, first_rows, fraction_of
from rlhf_pipeline.data.record_files import keys, phase_bits, serves
from rlhf_pipeline.data.tables import Table

_UNUSED = -1


@dataclass(frozen=True)
class Blend:
    """The rows of all sources, one after the other (N of them), and where each one goes."""

    parts: np.ndarray
    """(N,) int8: index into PARTS, or -1 for a row that is not used."""
    serves: np.ndarray
    """(N,) uint8: the phases that may use a row, as bits in the order of PHASES."""
    prompt_keys: np.ndarray
    """(N, 16) uint8: equal for equal prompts."""
    starts: list[int]
    """First row of each source, and N."""
    left_out: list[int]
    """Rows of each source beyond its fraction."""
    unservable: list[int]
    """Rows of each source that none of its phases can use, such as demonstrations where only PPO may train on them."""
    merged: list[int]
    """Rows of each source that an earlier source has as well: same prompt, same answers."""

    def rows(self, table: Table) -> tuple[np.ndarray, int]:
        """(N,) bool: the rows of a table; and how many more there are, of a prompt that it holds already."""
        chosen = self.parts == PARTS.index(table.part)
        if table.phase is not None:
            chosen &= (self.serves & phase_bits([table.phase])) > 0
        if table.answers:
            return chosen, 0
        candidates = np.flatnonzero(chosen)
        again = first_rows(self.prompt_keys[candidates]) != np.arange(len(candidates))
        chosen[candidates[again]] = False
        return chosen, int(again.sum())

    def distinct_prompts(self, part: Part) -> int:
        """Number of distinct prompts of a part."""
        chosen = self.prompt_keys[self.parts == PARTS.index(part)]
        return len(np.unique(first_rows(chosen)))


def blend(
    config: SplitConfig, sources: Sequence[pa.Table], sound: Sequence[np.ndarray], seed: int
) -> Blend:
    """Take each source's fraction, leave out what an earlier source has as well, and split the rest by prompt.

    Rows that a source repeats within itself stay: two annotators who agree are two judgements. A row that several sources
    have serves every phase that one of them may serve. `sound` (a (N,) bool for each source) leaves out rows that may not
    be used at all.

    Raises:
        DataError: a part gets no prompt, or some prompts serve no phase that has a weight.
    """
    starts = np.cumsum([0, *(table.num_rows for table in sources)])
    prompts, bits = _joined(sources, "prompt_key"), _servable(config, sources)
    taken = _taken(config, sources, seed)
    allowed = taken & np.concatenate(sound)
    usable = allowed & (bits > 0)
    candidates = np.flatnonzero(usable)
    own_start = np.repeat(starts[:-1], np.diff(starts))[candidates]
    earliest = candidates[first_rows(_joined(sources, "example_key")[candidates])]
    repeated = candidates[earliest < own_start]
    usable[repeated] = False
    np.bitwise_or.at(bits, earliest, bits[candidates])
    parts = np.full(len(prompts), _UNUSED, np.int8)
    parts[usable] = assign(
        prompts[usable],
        bits[usable],
        seed=seed,
        weights=config.weights,
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
    )
    return Blend(
        parts,
        bits,
        prompts,
        starts.tolist(),
        left_out=_per_source(np.flatnonzero(~taken), starts),
        unservable=_per_source(np.flatnonzero(allowed & (bits == 0)), starts),
        merged=_per_source(repeated, starts),
    )


def _servable(config: SplitConfig, sources: Sequence[pa.Table]) -> np.ndarray:
    """(N,) uint8: the phases that may use each row, by what it holds and by the configuration."""
    allowed = [
        phase_bits(PHASES if source.phases is None else source.phases) for source in config.sources
    ]
    return np.concatenate(
        [serves(table) & bits for table, bits in zip(sources, allowed, strict=True)]
    )


def _taken(config: SplitConfig, sources: Sequence[pa.Table], seed: int) -> np.ndarray:
    """(N,) bool: the rows within their source's fraction."""
    return np.concatenate(
        [
            fraction_of(keys(table, "prompt_key"), source.fraction, seed)
            if source.fraction < 1
            else np.ones(table.num_rows, bool)
            for source, table in zip(config.sources, sources, strict=True)
        ]
    )


def _per_source(rows: np.ndarray, starts: np.ndarray) -> list[int]:
    """How many of these rows belong to each source."""
    return np.diff(np.searchsorted(rows, starts)).tolist()


def _joined(sources: Sequence[pa.Table], column: str) -> np.ndarray:
    return np.concatenate([keys(table, column) for table in sources])
