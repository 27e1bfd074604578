"""Assign the rows of all sources to parts: fractions, duplicates, conversations, held-out texts.

Functions of keys take those of all rows as (N, 16) uint8 and return one value per row, whatever the
order of the rows. The search for near duplicates, which docs/data.md defines, is exact: an inverted
index counts shared grams (ScanCount in Li, Lu and Lu 2008, "Efficient Merging and Filtering
Algorithms for Approximate String Searches").
"""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import NEEDS, PHASES, Phase, SplitConfig
from rlhf_pipeline.data.phase_files import PARTS, Part, Table
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
    conversation_keys: np.ndarray
    """(N, 16) uint8 each; the rows of one conversation are in one part."""
    labelled: np.ndarray
    """(N,) bool: whether its answers are labelled good or bad."""
    references: pa.DictionaryArray
    """The true answer of the prompt of each of the N rows, or null."""
    starts: list[int]
    """First row of each source, and N."""
    counts: dict[str, list[int]]
    """Numbers of rows of each source by fate. left_out: beyond its fraction; unservable: none of
    its phases can use them; merged: an earlier source has their prompt and answers; in_test: a test
    source has their conversation; near: their first turn nearly repeats a held-out one; unanswered:
    their prompt has no true answer; dropped: so nothing can use them."""

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

    def kinds(self) -> list[list[Phase]]:
        """The phases that rows of the training data can serve, a list for each kind of row."""
        found = np.unique(self.serves[self.parts >= 0]).tolist()
        return [[phase for phase in PHASES if phase_bits([phase]) & bits] for bits in found if bits]

    def distinct(self, keys: np.ndarray, part: Part) -> int:
        """Number of distinct prompts or conversations of a part, by their keys."""
        return len(np.unique(first_rows(keys[self.parts == PARTS.index(part)])))


def blend(
    config: SplitConfig, sources: Sequence[pa.Table], usable: Sequence[np.ndarray], seed: int
) -> Blend:
    """Take each source's fraction, merge what an earlier source contains, split by conversation.

    Rows that a source repeats within itself stay: two annotators who agree are two judgements. A
    row of several sources serves every phase that one of these sources may serve. `usable` has one
    (rows,) bool for each source; False excludes a row. Raises DataError if conversations serve only
    phases of weight 0, or a prompt has two true answers.
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
    whole = _as_scalars(conversations)
    in_test = allowed & ~is_test & np.isin(whole, whole[allowed & is_test])
    used = allowed & ~in_test & ((bits > 0) | is_test)
    candidates = np.flatnonzero(used)
    earliest = candidates[first_rows(keys(rows, "example_key")[candidates])]
    repeated = candidates[earliest < np.repeat(starts[:-1], sizes)[candidates]]
    used[repeated] = False
    np.bitwise_or.at(bits, earliest, bits[candidates])
    parts = np.full(len(prompts), PARTS.index("test"), np.int8)
    divided = used & ~is_test
    parts[divided] = assign(conversations[divided], bits[divided], config, seed)
    if config.held_back:
        own = np.flatnonzero(parts == PARTS.index("reward_model"))
        held_back = own[fraction_of(conversations[own], config.held_back, seed)]
        parts[held_back] = PARTS.index("judge_model")
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
    rows_of = prompts, conversations, labelled(rows), references
    return Blend(parts, bits, *rows_of, starts.tolist(), counts)


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


def assign(keys: np.ndarray, serves: np.ndarray, config: SplitConfig, seed: int) -> np.ndarray:
    """Assign a part to every row, by its conversation: (N,) int8, index into PARTS.

    `serves` is (N,) uint8; bit i is set if the row can serve PHASES[i]. A conversation can serve
    what one of its rows can. Conversations that can serve the same phases form a class, which is
    sorted by SHA-256 of the bytes "split\\n<seed>\\n" and the key, then cut into runs of exact
    quotas, rounded by largest remainder, held-out parts first. `config.weights` divides the rest
    among the phases that the class can serve, so a phase that no class can serve gets nothing.
    Raises DataError if a class can serve only phases of weight 0.
    """
    conversations, conversation_of_row = np.unique(_as_scalars(keys), return_inverse=True)
    servable = np.zeros(len(conversations), np.uint8)
    np.bitwise_or.at(servable, conversation_of_row, serves)
    ordered = _hash_order(conversations, f"split\n{seed}\n")
    parts = np.empty(len(conversations), np.int8)
    for bits in np.unique(servable):
        members = ordered[servable[ordered] == bits]
        sizes = apportion(len(members), _shares(config, bits, len(members)))
        parts[members] = np.repeat(np.arange(len(sizes)), sizes)
    return parts[conversation_of_row]


def apportion(total: int, shares: list[Fraction]) -> list[int]:
    """Divide `total` by shares that sum to 1, by largest remainder; of equal ones, the earlier."""
    quotas = [total * share for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda index: sizes[index] - quotas[index])
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def fraction_of(keys: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Select a fraction of the distinct keys, but at least one; return their rows as (N,) bool.

    Their number is rounded, a half upwards. The first by SHA-256 of the bytes
    "fraction\\n<seed>\\n" and the key are selected, so a smaller fraction is part of a larger one.
    """
    if fraction == 1:
        return np.ones(len(keys), np.bool_)
    prompts, prompt_of_row = np.unique(_as_scalars(keys), return_inverse=True)
    quota = len(prompts) * _exact(fraction)
    count = math.floor(quota + Fraction(1, 2)) or math.ceil(quota)
    chosen = np.zeros(len(prompts), np.bool_)
    chosen[_hash_order(prompts, f"fraction\n{seed}\n")[:count]] = True
    return chosen[prompt_of_row]


def first_rows(keys: np.ndarray) -> np.ndarray:
    """The index of the first row with the same key, for every row: (N,) integers."""
    _, first, key_of_row = np.unique(_as_scalars(keys), return_index=True, return_inverse=True)
    return first[key_of_row]


def _as_scalars(keys: np.ndarray) -> np.ndarray:
    """Keys as (N,) scalars, which numpy sorts as bytes, much faster than rows."""
    return np.ascontiguousarray(keys).view("V16").ravel()


def _hash_order(distinct: np.ndarray, prefix: str) -> np.ndarray:
    """The indices that sort distinct keys by SHA-256 of the prefix and the key."""
    start, keys = prefix.encode(), distinct.tobytes()
    digests = (
        hashlib.sha256(start + keys[at : at + 16]).digest() for at in range(0, len(keys), 16)
    )
    return np.argsort(np.fromiter(digests, "V32", len(distinct)))


def _shares(config: SplitConfig, bits: int, conversations: int) -> list[Fraction]:
    """The exact share of every part in a class, in the order of PARTS; none of judge_model."""
    able = [phase for index, phase in enumerate(PHASES) if bits >> index & 1]
    given = list(zip(PHASES, config.weights, strict=True))
    weights = [_exact(weight) if phase in able else Fraction(0) for phase, weight in given]
    if not any(weights):
        sources = " or ".join(source.label() for source in config.sources if not source.is_test)
        needs = "; ".join(f"{phase} needs {NEEDS[phase]}" for phase, weight in given if weight)
        raise DataError(
            f"split: found {conversations} distinct conversations that serve only phases of weight "
            f"0 ({', '.join(able) or 'none'}), in {sources}, expected some for a "
            f"phase in use: {needs}. Fix: name these columns in `columns` of the source, remove "
            "the source, or give a phase that it serves a weight in split.weights and a stage that "
            "is not null"
        )
    test, validation = _exact(config.test_fraction), _exact(config.validation_fraction)
    rest = (1 - test - validation) / sum(weights)
    return [test, validation, *(rest * weight for weight in weights)]


def _exact(number: float) -> Fraction:
    """The decimal that is written: 0.02 is 1/50, not the nearest binary fraction."""
    return Fraction(str(number))
