"""Which prompt belongs to which part: disjoint by construction, the same on every machine, exact for any size.

A prompt is known by its 16-byte key (`records.key`). Functions take the keys of all rows as (N, 16) uint8, where a prompt
may fill any number of rows, and answer row by row; neither the order of the rows nor how often a prompt occurs changes
what becomes of it. Memory is a small multiple of the keys'.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import compress
from typing import Any, Literal, get_args

import numpy as np

from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.errors import DataError

Part = Literal["test", "validation", "sft", "reward_model", "ppo"]
PARTS: tuple[Part, ...] = get_args(Part)


def assign(
    keys: np.ndarray,
    serves: np.ndarray,
    *,
    seed: int,
    weights: tuple[float, float, float],
    validation_fraction: float,
    test_fraction: float,
) -> np.ndarray:
    """The part of every row's prompt, as (N,) int8 that indexes PARTS.

    A prompt can serve the phases that its rows can serve together. Prompts that can serve the same phases form a class,
    and every class is divided by itself: ordered by SHA-256 of the ASCII bytes "split\\n<seed>\\n" followed by the key, then
    cut into consecutive runs, the held-out parts first. The runs' sizes are the shares' exact quotas rounded by largest
    remainder, so each is within 1 of its quota. `weights` (of sft, reward_model and ppo) divides what validation and test
    leave of the class among the phases it can serve. Other weights move at most a prompt or two of a class in or out of
    the held-out parts; other classes move none.

    Args:
        keys: (N, 16) uint8.
        serves: (N,) uint8; bit i is set where the row can serve PHASES[i].

    Raises:
        DataError: a class can serve only phases of weight 0; or a part with a positive share would get no prompt.
    """
    prompts, prompt_of_row = np.unique(_scalars(keys), return_inverse=True)
    servable = np.zeros(len(prompts), np.uint8)
    np.bitwise_or.at(servable, prompt_of_row, serves)
    ordered = _ordered(prompts, f"split\n{seed}\n")
    parts = np.empty(len(prompts), np.int8)
    for bits in np.unique(servable):
        members = ordered[servable[ordered] == bits]
        usable = _usable(weights, bits, len(members))
        sizes = apportion(len(members), _shares(usable, validation_fraction, test_fraction))
        parts[members] = np.repeat(np.arange(len(PARTS)), sizes)
    _require_prompts((test_fraction, validation_fraction, *weights), parts, servable)
    return parts[prompt_of_row]


def apportion(total: int, shares: list[Fraction]) -> list[int]:
    """Whole numbers that sum to `total`, each within 1 of `total * share`, by largest remainder (Hamilton's method).

    `shares` sum to 1. Of equal remainders the earlier share is served first.
    """
    quotas = [total * share for share in shares]
    sizes = [quota.numerator // quota.denominator for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda index: sizes[index] - quotas[index])
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def fraction_of(keys: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """True at the rows whose prompt belongs to a share of the distinct prompts, as (N,) bool.

    `fraction` (from 0 to 1) of the prompts is rounded to the nearest whole number, a half upwards, and a positive
    fraction of any prompts is at least one. These are the first prompts by SHA-256 of the ASCII bytes
    "fraction\\n<seed>\\n" followed by the key: a smaller fraction's are among a larger one's, and which they are says
    nothing about their part in `assign`.
    """
    prompts, prompt_of_row = np.unique(_scalars(keys), return_inverse=True)
    quota = len(prompts) * _exact(fraction)
    count = math.floor(quota + Fraction(1, 2)) or math.ceil(quota)
    chosen = np.zeros(len(prompts), np.bool_)
    chosen[_ordered(prompts, f"fraction\n{seed}\n")[:count]] = True
    return chosen[prompt_of_row]


def first_rows(keys: np.ndarray) -> np.ndarray:
    """For every row, the number of the first row with the same key, as (N,) integers."""
    _, first, key_of_row = np.unique(_scalars(keys), return_index=True, return_inverse=True)
    return first[key_of_row]


def _scalars(keys: np.ndarray) -> np.ndarray:
    """A key a scalar instead of a key a row: numpy sorts those as bytes, and much faster than rows."""
    return np.ascontiguousarray(keys).view("V16").ravel()


def _ordered(prompts: np.ndarray, prefix: str) -> np.ndarray:
    """The indices that sort distinct prompts by SHA-256 of the prefix and the key."""
    start, keys = prefix.encode(), prompts.tobytes()
    digests = (
        hashlib.sha256(start + keys[at : at + 16]).digest() for at in range(0, len(keys), 16)
    )
    return np.argsort(np.fromiter(digests, "V32", len(prompts)))


def _usable(weights: tuple[float, float, float], bits: int, prompts: int) -> list[float]:
    """The weights, with 0 for the phases that a class of so many prompts cannot serve."""
    able = [bool(bits >> index & 1) for index in range(len(PHASES))]
    usable = [weight if can else 0 for weight, can in zip(weights, able, strict=True)]
    if not any(usable):
        raise DataError(
            f"{prompts} distinct prompts serve only phases of weight 0 ({', '.join(compress(PHASES, able)) or 'none'}). "
            "Give such a phase weight, let the sources of these prompts serve other phases, or remove those sources."
        )
    return usable


def _shares(
    weights: list[float], validation_fraction: float, test_fraction: float
) -> list[Fraction]:
    """Every part's exact share."""
    test, validation = _exact(test_fraction), _exact(validation_fraction)
    exact = [_exact(weight) for weight in weights]
    return [test, validation, *((1 - test - validation) * weight / sum(exact) for weight in exact)]


def _exact(number: float) -> Fraction:
    """A decimal means itself: 0.02 is 1/50, not the nearest binary fraction."""
    return Fraction(str(number))


def _require_prompts(shares: tuple[float, ...], parts: np.ndarray, servable: np.ndarray) -> None:
    sizes = dict(zip(PARTS, np.bincount(parts, minlength=len(PARTS)), strict=True))
    starved = [
        part for part, share in zip(PARTS, shares, strict=True) if share > 0 and sizes[part] == 0
    ]
    if starved:
        able = {
            phase: np.count_nonzero(servable >> index & 1) for index, phase in enumerate(PHASES)
        }
        raise DataError(
            f"{len(parts)} distinct prompts leave none for {', '.join(starved)} "
            f"(sizes: {_listed(sizes)}; able to serve: {_listed(able)}). "
            "Add data, or change weights, validation_fraction or test_fraction (0 switches a part off)."
        )


def _listed(counts: Mapping[Any, object]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
