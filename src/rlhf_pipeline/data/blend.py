"""Assign the rows of all sources to parts: fractions, duplicates, conversations, held-out texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data.near_duplicates import near_duplicates
from rlhf_pipeline.data.parts import PARTS, Part, among, assign, first_rows, fraction_of
from rlhf_pipeline.data.phase_files import Table
from rlhf_pipeline.data.record_files import first_turns, keys, phase_bits, serves
from rlhf_pipeline.data.true_answers import true_answers


@dataclass(frozen=True)
class Blend:
    """The N rows of all sources, source after source, and the part of each row."""

    parts: np.ndarray
    """(N,) int8: index into PARTS, or -1 for an unused row."""
    serves: np.ndarray
    """(N,) uint8: the phases that may use a row, as bits in the order of PHASES."""
    prompt_keys: np.ndarray
    """(N, 16) uint8: equal for equal prompts."""
    conversation_keys: np.ndarray
    """(N, 16) uint8: equal for prompts of one conversation, which are in one part."""
    references: pa.DictionaryArray
    """The true answer of the prompt of each of the N rows, or null."""
    starts: list[int]
    """First row of each source, and N."""
    left_out: list[int]
    """Rows of each source beyond its fraction."""
    unservable: list[int]
    """Rows of each source that none of its phases can use, such as demonstrations of a source with
    `phases: [ppo]`."""
    merged: list[int]
    """Rows of each source that repeat a row of an earlier source: same prompt, same answers."""
    in_test: list[int]
    """Rows of each source that leave it, since a test source has their conversation."""
    near: list[int]
    """Rows of each source whose first turn nearly repeats a held-out one: left out, or kept."""
    unanswered: list[int]
    """Rows of each source whose prompt has no true answer."""
    dropped: list[int]
    """Those of `unanswered` that leave all files, since only PPO or the test could use them."""

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

    def distinct(self, keys: np.ndarray, part: Part) -> int:
        """Number of distinct prompts or conversations of a part, by their keys."""
        return len(np.unique(first_rows(keys[self.parts == PARTS.index(part)])))


def blend(
    config: SplitConfig, sources: Sequence[pa.Table], usable: Sequence[np.ndarray], seed: int
) -> Blend:
    """Take each source's fraction, merge what an earlier source contains, split by conversation.

    Conversations of a test source leave the other sources. Near duplicates of held-out ones leave
    training, unless `near_duplicates` is "keep". Rows that a source repeats within itself stay: two
    annotators who agree are two judgements. A row of several sources serves every phase that one of
    these sources may serve. `usable` has one (rows,) bool for each source; False excludes a row.
    Raises DataError if a part gets no conversation, some serve only phases of weight 0, or a prompt
    has two true answers.
    """
    rows = pa.concat_tables(sources)
    starts = np.cumsum([0, *(table.num_rows for table in sources)])
    prompts, conversations = keys(rows, "prompt_key"), keys(rows, "conversation_key")
    is_test = np.repeat([source.is_test for source in config.sources], np.diff(starts))
    may_serve = [phase_bits(filter(source.may_serve, PHASES)) for source in config.sources]
    bits = serves(rows) & np.repeat(may_serve, np.diff(starts)).astype(np.uint8)
    by_source = zip(config.sources, np.split(prompts, starts[1:-1]), strict=True)
    fractions = [fraction_of(own, source.fraction, seed) for source, own in by_source]
    within_fraction = np.concatenate(fractions)
    allowed = within_fraction & np.concatenate(usable)
    references = true_answers(rows, prompts, allowed)
    unanswered = allowed & references.is_null().to_numpy(zero_copy_only=False)
    servable = (bits > 0) | is_test
    if config.without_reference == "drop":
        bits[unanswered] &= ~np.uint8(phase_bits(["ppo"]))
    in_test = allowed & ~is_test & among(conversations, conversations[allowed & is_test])
    used = allowed & ~in_test & ((bits > 0) | is_test)
    candidates = np.flatnonzero(used)
    example_keys = keys(rows, "example_key")
    own_start = np.repeat(starts[:-1], np.diff(starts))[candidates]
    earliest = candidates[first_rows(example_keys[candidates])]
    repeated = candidates[earliest < own_start]
    used[repeated] = False
    np.bitwise_or.at(bits, earliest, bits[candidates])
    parts = np.full(len(prompts), PARTS.index("test"), np.int8)
    divided = used & ~is_test
    parts[divided] = assign(conversations[divided], bits[divided], config, seed)
    if config.without_reference == "drop":
        used &= ~unanswered | (parts != PARTS.index("test"))
    parts[~used] = -1
    merged = np.isin(np.arange(len(parts)), repeated)
    near = _near_held_out(rows, conversations, parts)
    if config.near_duplicates == "drop":
        parts[near] = -1

    def counts(chosen: np.ndarray) -> list[int]:
        return [int(own.sum()) for own in np.split(chosen, starts[1:-1])]

    return Blend(
        parts,
        bits,
        prompts,
        conversations,
        references,
        starts.tolist(),
        left_out=counts(~within_fraction),
        unservable=counts(allowed & ~in_test & ~servable),
        merged=counts(merged),
        in_test=counts(in_test),
        near=counts(near),
        unanswered=counts(unanswered),
        dropped=counts(unanswered & ~in_test & ~merged & servable & ~used),
    )


def _near_held_out(rows: pa.Table, conversations: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """(N,) bool: training rows near a held-out first turn, and validation rows near a test one."""
    used = np.flatnonzero(parts >= 0)
    first = used[first_rows(conversations[used])]
    distinct = np.unique(first)
    near = np.zeros(len(parts), np.bool_)
    test, validation = (parts[distinct] == PARTS.index(part) for part in ("test", "validation"))
    for chosen, held_out in ((validation, test), (~test & ~validation, test | validation)):
        near[distinct[chosen]] = near_duplicates(
            first_turns(rows, distinct[chosen]), first_turns(rows, distinct[held_out])
        )
    near[used] = near[first]
    return near
