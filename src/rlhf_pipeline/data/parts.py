"""Assign conversations to parts: disjoint, exact for any size, the same on every machine.

The functions take the 16-byte keys of all rows as (N, 16) uint8, and return one value per row,
which depends neither on the order nor on the number of rows. Memory is a small multiple of the
keys.
"""

import hashlib
import math
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from rlhf_pipeline.config.split import PHASES, SplitConfig
from rlhf_pipeline.errors import DataError

Part = Literal["test", "validation", "sft", "reward_model", "ppo"]
PARTS: tuple[Part, ...] = get_args(Part)


def assign(keys: np.ndarray, serves: np.ndarray, config: SplitConfig, seed: int) -> np.ndarray:
    """Assign a part to every row, by its conversation: (N,) int8, index into PARTS.

    `serves` is (N,) uint8; bit i is set if the row can serve PHASES[i]. A conversation can serve
    what one of its rows can. Conversations that can serve the same phases form a class, which is
    sorted by SHA-256 of the bytes "split\\n<seed>\\n" and the key, then cut into runs of exact
    quotas, rounded by largest remainder, held-out parts first. `config.weights` divides the rest
    among the phases that the class can serve. Raises DataError if a class can serve only phases of
    weight 0, or a part with a positive share gets no conversation.
    """
    conversations, conversation_of_row = np.unique(_as_scalars(keys), return_inverse=True)
    servable = np.zeros(len(conversations), np.uint8)
    np.bitwise_or.at(servable, conversation_of_row, serves)
    ordered = _hash_order(conversations, f"split\n{seed}\n")
    parts = np.empty(len(conversations), np.int8)
    for bits in np.unique(servable):
        members = ordered[servable[ordered] == bits]
        sizes = apportion(len(members), _shares(config, bits, len(members)))
        parts[members] = np.repeat(np.arange(len(PARTS)), sizes)
    _require_conversations(config, parts, servable)
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
    """Select a fraction of the distinct prompts, but at least one; return their rows as (N,) bool.

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


def among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each key is one of the `known` keys: (N,) bool."""
    return np.isin(_as_scalars(keys), _as_scalars(known))


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
    """The exact share of every part in a class, in the order of PARTS."""
    able = [phase for index, phase in enumerate(PHASES) if bits >> index & 1]
    given = zip(PHASES, config.weights, strict=True)
    weights = [_exact(weight) if phase in able else Fraction(0) for phase, weight in given]
    if not any(weights):
        raise DataError(
            f"{conversations} distinct conversations serve only phases of weight 0 "
            f"({', '.join(able) or 'none'}). Fix: give one of these phases a "
            "weight in split.weights and a stage that is not null, change `phases` of their "
            "sources, or remove these sources."
        )
    test, validation = _exact(config.test_fraction), _exact(config.validation_fraction)
    rest = (1 - test - validation) / sum(weights)
    return [test, validation, *(rest * weight for weight in weights)]


def _exact(number: float) -> Fraction:
    """The decimal that is written: 0.02 is 1/50, not the nearest binary fraction."""
    return Fraction(str(number))


def _require_conversations(config: SplitConfig, parts: np.ndarray, servable: np.ndarray) -> None:
    shares = (config.test_fraction, config.validation_fraction, *config.weights)
    sizes = dict(zip(PARTS, np.bincount(parts, minlength=len(PARTS)), strict=True))
    given = zip(PARTS, shares, strict=True)
    empty = [part for part, share in given if share > 0 and not sizes[part]]
    if empty and not config.is_test:
        able = {
            phase: np.count_nonzero(servable >> index & 1) for index, phase in enumerate(PHASES)
        }
        found, serving = (
            ", ".join(f"{name} {count}" for name, count in counts.items())
            for counts in (sizes, able)
        )
        raise DataError(
            f"{', '.join(empty)}: found none of {len(parts)} distinct conversations, expected at "
            f"least 1 (sizes: {found}; able to serve: {serving}). Fix: add data, or change "
            "weights, validation_fraction or test_fraction (0 disables a part)."
        )
