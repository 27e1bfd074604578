"""Assign the rows of all sources to parts: fractions, duplicates, conversations, held-out texts.

Near duplicates have a Jaccard similarity of at least 0.8 of their sets of word 5-grams; grams that
more than 100 held-out texts share do not count. The search is exact: an inverted index counts
shared grams (ScanCount in Li, Lu and Lu 2008, "Efficient Merging and Filtering Algorithms for
Approximate String Searches").
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.data.parts import PARTS, Part, among, assign, first_rows, fraction_of
from rlhf_pipeline.data.phase_files import Table
from rlhf_pipeline.data.record_files import first_turns, keys, labelled, phase_bits, serves
from rlhf_pipeline.data.records import normalized
from rlhf_pipeline.errors import DataError

_WORDS = 5
_COMMON = 100


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
    labelled: np.ndarray
    """(N,) bool: whether the answers of a row are labelled good or bad."""
    references: pa.DictionaryArray
    """The true answer of the prompt of each of the N rows, or null."""
    starts: list[int]
    """First row of each source, and N."""
    counts: dict[str, list[int]]
    """The numbers of rows of each source with one of these fates.

    left_out: beyond its fraction; unservable: none of its phases can use them; merged: an earlier
    source has their prompt and answers; in_test: a test source has their conversation; near: their
    first turn nearly repeats a held-out one; unanswered: their prompt has no true answer; dropped:
    unanswered, and in no file, since only PPO or the test could use them
    """

    def rows(self, table: Table) -> tuple[np.ndarray, int]:
        """The rows of a table as (N,) bool, and how many were left out as repeated prompts."""
        chosen = self.parts == PARTS.index(table.part)
        if table.phase is not None:
            chosen &= (self.serves & phase_bits([table.phase])) > 0
        if table.phase == "reward_model":
            chosen &= self.labelled == table.labelled
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

    Rows that a source repeats within itself stay: two annotators who agree are two judgements. A
    row of several sources serves every phase that one of these sources may serve. `usable` has one
    (rows,) bool for each source; False excludes a row. Raises DataError if a part gets no
    conversation, some serve only phases of weight 0, or a prompt has two true answers.
    """
    rows = pa.concat_tables(sources, promote_options="default")  # some have no column `extra`
    starts = np.cumsum([0, *(table.num_rows for table in sources)])
    sizes = np.diff(starts)
    prompts, conversations = keys(rows, "prompt_key"), keys(rows, "conversation_key")
    is_test = np.repeat([source.is_test for source in config.sources], sizes)
    may_serve = [phase_bits(filter(source.may_serve, PHASES)) for source in config.sources]
    bits = serves(rows) & np.repeat(may_serve, sizes).astype(np.uint8)
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
    earliest = candidates[first_rows(keys(rows, "example_key")[candidates])]
    repeated = candidates[earliest < np.repeat(starts[:-1], sizes)[candidates]]
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

    fates = {
        "left_out": ~within_fraction,
        "unservable": allowed & ~in_test & ~servable,
        "merged": merged,
        "in_test": in_test,
        "near": near,
        "unanswered": unanswered,
        "dropped": unanswered & ~in_test & ~merged & servable & ~used,
    }
    counts = {
        name: [int(own.sum()) for own in np.split(rows_with, starts[1:-1])]
        for name, rows_with in fates.items()
    }
    return Blend(
        parts, bits, prompts, conversations, labelled(rows), references, starts.tolist(), counts
    )


def _near_held_out(rows: pa.Table, conversations: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """(N,) bool: training rows near a held-out first turn, and validation rows near a test one."""
    used, near = np.flatnonzero(parts >= 0), np.zeros(len(parts), np.bool_)
    first = used[first_rows(conversations[used])]
    distinct = np.unique(first)
    test, validation = (parts[distinct] == PARTS.index(part) for part in ("test", "validation"))
    for chosen, held_out in ((validation, test), (~test & ~validation, test | validation)):
        near[distinct[chosen]] = near_duplicates(
            first_turns(rows, distinct[chosen]), first_turns(rows, distinct[held_out])
        )
    near[used] = near[first]
    return near


def true_answers(
    rows: pa.Table, prompt_keys: np.ndarray, allowed: np.ndarray
) -> pa.DictionaryArray:
    """The true answer of the prompt of each of N examples, null if none of its rows has one.

    `prompt_keys` are (N, 16) uint8; only `allowed` rows, (N,) bool, are read. Raises DataError if
    rows of one prompt have different true answers.
    """
    encoded = rows.column("reference").combine_chunks().dictionary_encode()
    own = np.where(allowed, encoded.indices.fill_null(-1).to_numpy(), -1)
    order = np.argsort(own < 0, kind="stable")  # the rows with an answer first
    answers = np.empty_like(own)
    answers[order] = own[order][first_rows(prompt_keys[order])]
    different = np.flatnonzero((own >= 0) & (own != answers))
    if len(different):
        (row,) = rows.slice(int(different[0]), 1).to_pylist()
        raise DataError(
            f"split: found {len(np.unique(first_rows(prompt_keys[different])))} prompts with "
            "different true answers, expected one each. For example, "
            f"{row['prompt'][-1]['content'][:200]!r} has {row['reference']!r} ({row['id']}) and "
            f"{encoded.dictionary[answers[different[0]]].as_py()!r}. Fix: correct the answers, or "
            "remove columns.reference of one source"
        )
    indices = pa.array(answers, mask=answers < 0)
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def near_duplicates(texts: Iterable[str], held_out: Iterable[str]) -> np.ndarray:
    """(N,) bool: the texts near a held-out one. Memory grows with the held-out texts alone."""
    whole = [_grams(text) for text in held_out]
    common = {gram for gram, n in Counter(chain.from_iterable(whole)).items() if n > _COMMON}

    def telling(grams: set[str]) -> set[str]:
        """Without common grams; of nothing else, one gram that stands for all of them."""
        return grams - common or {" ".join(sorted(grams))}

    numbers: dict[str, int] = {}
    grams_of_all, sizes = array("q"), np.empty(len(whole), np.int64)
    for index, grams in enumerate(map(telling, whole)):
        grams_of_all.extend(numbers.setdefault(gram, len(numbers)) for gram in grams)
        sizes[index] = len(grams)
    # The held-out texts with gram g are holders[starts[g] : starts[g + 1]].
    holders = np.repeat(np.arange(len(whole)), sizes)[np.argsort(grams_of_all, kind="stable")]
    starts = [0, *np.bincount(grams_of_all, minlength=len(numbers)).cumsum().tolist()]

    def is_near(grams: set[str]) -> bool:
        found = numbers.keys() & grams
        if 5 * len(found) < 4 * len(grams):  # most texts: all shared grams together are too few
            return False
        owners = [holders[starts[n] : starts[n + 1]] for n in map(numbers.__getitem__, found)]
        shared = np.bincount(np.concatenate(owners), minlength=len(whole))
        # shared / (own + sizes - shared) >= 4 / 5
        return bool((9 * shared >= 4 * (len(grams) + sizes)).any())

    return np.fromiter((is_near(telling(_grams(text))) for text in texts), np.bool_)


def _grams(text: str) -> set[str]:
    """All runs of five words of a normalized text, or the text itself if it is shorter."""
    text = normalized(text)
    starts = [0, *accumulate(len(word) + 1 for word in text.split(" "))]
    return {text[start : end - 1] for start, end in zip(starts, starts[_WORDS:])} or {text}  # noqa: B905
