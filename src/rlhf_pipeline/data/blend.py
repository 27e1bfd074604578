"""Assign the rows of all sources to parts: take fractions, merge duplicates, split by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data.parts import PARTS, Part, assign, first_rows, fraction_of
from rlhf_pipeline.data.phase_files import Table
from rlhf_pipeline.data.record_files import keys, phase_bits, serves


@dataclass(frozen=True)
class Blend:
    """The N rows of all sources, source after source, and the part of each row."""

    parts: np.ndarray
    """(N,) int8: index into PARTS, or -1 for an unused row."""
    serves: np.ndarray
    """(N,) uint8: the phases that may use a row, as bits in the order of PHASES."""
    prompt_keys: np.ndarray
    """(N, 16) uint8: equal for equal prompts."""
    starts: list[int]
    """First row of each source, and N."""
    left_out: list[int]
    """Rows of each source beyond its fraction."""
    unservable: list[int]
    """Rows of each source that none of its phases can use, such as demonstrations of a source with
    `phases: [ppo]`."""
    merged: list[int]
    """Rows of each source that repeat a row of an earlier source: same prompt, same answers."""

    def rows(self, table: Table) -> tuple[np.ndarray, int]:
        """The rows of a table as (N,) bool, and the number of rows left out as repeated prompts."""
        chosen = self.parts == PARTS.index(table.part)
        if table.phase is not None:
            chosen &= (self.serves & phase_bits([table.phase])) > 0
        if table.answers:
            return chosen, 0
        candidates = np.flatnonzero(chosen)
        repeated = first_rows(self.prompt_keys[candidates]) != np.arange(len(candidates))
        chosen[candidates[repeated]] = False
        return chosen, int(repeated.sum())

    def distinct_prompts(self, part: Part) -> int:
        """Number of distinct prompts of a part."""
        chosen = self.prompt_keys[self.parts == PARTS.index(part)]
        return len(np.unique(first_rows(chosen)))


def blend(
    config: SplitConfig, sources: Sequence[pa.Table], usable: Sequence[np.ndarray], seed: int
) -> Blend:
    """Take each source's fraction, merge what an earlier source contains, split the rest by prompt.

    Rows that a source repeats within itself stay: two annotators who agree are two judgements. A
    row of several sources serves every phase that one of these sources may serve. `usable` has one
    (rows,) bool for each source; False excludes a row. Raises DataError if a part gets no prompt,
    or some prompts serve only phases of weight 0.
    """
    starts = np.cumsum([0, *(table.num_rows for table in sources)])
    prompt_keys = [keys(table, "prompt_key") for table in sources]
    prompts = np.concatenate(prompt_keys)
    configured = list(zip(config.sources, sources, prompt_keys, strict=True))
    bits = np.concatenate(
        [serves(table) & phase_bits(source.phases or PHASES) for source, table, _ in configured]
    )
    within_fraction = np.concatenate(
        [fraction_of(own_keys, source.fraction, seed) for source, _, own_keys in configured]
    )
    allowed = within_fraction & np.concatenate(usable)
    used = allowed & (bits > 0)
    candidates = np.flatnonzero(used)
    example_keys = np.concatenate([keys(table, "example_key") for table in sources])
    own_start = np.repeat(starts[:-1], np.diff(starts))[candidates]
    earliest = candidates[first_rows(example_keys[candidates])]
    repeated = candidates[earliest < own_start]
    used[repeated] = False
    np.bitwise_or.at(bits, earliest, bits[candidates])
    parts = np.full(len(prompts), -1, np.int8)
    parts[used] = assign(prompts[used], bits[used], config, seed)
    return Blend(
        parts,
        bits,
        prompts,
        starts.tolist(),
        left_out=_count_per_source(np.flatnonzero(~within_fraction), starts),
        unservable=_count_per_source(np.flatnonzero(allowed & (bits == 0)), starts),
        merged=_count_per_source(repeated, starts),
    )


def _count_per_source(rows: np.ndarray, starts: np.ndarray) -> list[int]:
    """How many of these rows belong to each source."""
    return np.diff(np.searchsorted(rows, starts)).tolist()
