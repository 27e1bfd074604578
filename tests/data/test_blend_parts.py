from __future__ import annotations

import hashlib
import random
from collections import Counter
from fractions import Fraction
from functools import reduce
from operator import or_

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import apportion, assign, first_rows, fraction_of
from rlhf_pipeline.data.phase_files import PARTS
from rlhf_pipeline.errors import DataError

SFT, REWARD_MODEL, PPO = 0b001, 0b010, 0b100
ALL = SFT | REWARD_MODEL | PPO


def keys_of(prompts) -> np.ndarray:
    """The key of letter "a" is sixteen bytes "a"; the key of a number is its sixteen bytes."""
    rows = [
        prompt.encode() * 16 if isinstance(prompt, str) else prompt.to_bytes(16, "big")
        for prompt in prompts
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)


def split(
    prompts, serves=ALL, *, seed=0, weights=(2, 4, 4), validation_fraction=0.02, test_fraction=0.02
) -> list[str]:
    """The parts of the rows, by name."""
    parts = assign(
        keys_of(prompts),
        np.broadcast_to(np.array(serves, np.uint8), len(prompts)),
        SplitConfig(
            sources=[{}],
            max_prompt_tokens=1,
            max_response_tokens=1,
            weights=weights,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
        ),
        seed,
    )
    assert parts.dtype == np.int8
    return [PARTS[part] for part in parts]


def sizes(prompts, *arguments, **options) -> dict[str, int]:
    return Counter(split(prompts, *arguments, **options))


NOTHING_HELD_OUT = {"validation_fraction": 0, "test_fraction": 0}


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        # Quotas 2.5, 2.5, 5: one prompt is left; of equal remainders, the first is rounded up.
        (10, [(1, 4), (1, 4), (1, 2)], [3, 2, 5]),
        # Quotas 0.4, 1.2, 2.4: floors 0, 1, 2 leave one; of the largest
        # remainders 0.4 and 0.4, the first is rounded up.
        (4, [(1, 10), (3, 10), (6, 10)], [1, 1, 2]),
        # A share of 0 gets nothing: quotas 0, 3.5, 3.5.
        (7, [(0, 1), (1, 2), (1, 2)], [0, 4, 3]),
        (0, [(1, 2), (1, 2)], [0, 0]),
    ],
)
def test_largest_remainder(total: int, shares: list[tuple[int, int]], expected: list[int]) -> None:
    assert apportion(total, [Fraction(*share) for share in shares]) == expected


def test_decimals_are_exact() -> None:
    # The float 0.3 is slightly less than 3/10, which would decide a tie of remainders.
    # Quotas 9 * 3/6 = 4.5, 3 and 1.5: of the two remainders, the first is rounded up.
    expected = {"sft": 5, "reward_model": 3, "ppo": 1}
    assert sizes("abcdefghi", weights=(0.3, 0.2, 0.1), **NOTHING_HELD_OUT) == expected
    # Quotas 5 * 3/10 = 1.5 and 3.5: test comes first.
    expected = {"test": 2, "reward_model": 3}
    assert sizes("abcde", weights=(0, 1, 0), validation_fraction=0, test_fraction=0.3) == expected


@pytest.mark.parametrize(
    ("serves", "weights", "named"),
    [(SFT, (0, 4, 4), "sft"), (SFT | PPO, (0, 1, 0), "sft, ppo"), (0, (2, 4, 4), "none")],
)
def test_prompts_for_phases_without_weight_are_an_error(serves: int, weights, named: str) -> None:
    prompts = [*range(10), 10, 11, 11, 12]
    with pytest.raises(
        DataError,
        match=rf"^split: found 3 distinct conversations that serve only phases of weight 0 "
        rf"\({named}\), in synthetic, expected some for a phase in use: .* Fix: name these columns",
    ):
        split(prompts, [ALL] * 10 + [serves] * 4, weights=weights, **NOTHING_HELD_OUT)


def test_the_order_is_sha256_of_seed_and_key() -> None:
    # printf 'split\n0\naaaaaaaaaaaaaaaa' | sha256sum, and so on.
    # Seed 0: a 0cf3, b 1c9a, d 43da, c 84c8. Seed 1: b 3113, c 68c0, d 8f34, a dd63.
    even = {"weights": (1, 1, 1), "validation_fraction": 0, "test_fraction": 0.25}
    assert split("abcd", seed=0, **even) == ["test", "sft", "ppo", "reward_model"]
    assert split("abcd", seed=1, **even) == ["ppo", "test", "sft", "reward_model"]


def test_the_split_is_that_of_earlier_versions() -> None:
    """The expected digests were computed by sorting plain lists, without numpy."""
    numbers = [number * number % 1009 for number in range(2000)]
    digests = [list(hashlib.sha256(b"%d" % number).digest()[:16]) for number in numbers]
    keys = np.array(digests, np.uint8)
    serves = np.array([[0b111, 0b001, 0b111, 0b100][number % 4] for number in numbers], np.uint8)
    config = SplitConfig(
        sources=[{}], max_prompt_tokens=1, max_response_tokens=1, test_fraction=0.1
    )
    parts = assign(keys, serves, config, seed=7)
    assert hashlib.sha256(parts.tobytes()).hexdigest()[:16] == "c39c4d3e7f7002e9"
    chosen = fraction_of(keys, 0.3, seed=7)
    assert hashlib.sha256(chosen.tobytes()).hexdigest()[:16] == "bf74de3d40a0a884"


usual = st.sampled_from([1, 2, 4, 6, 0.1, 0.2, 0.3, 2.718281828])
unusual = st.one_of(usual, st.just(0), st.floats(1e-9, 1e300))
a_fraction = st.sampled_from([0, 0, 0.02, 0.1, 0.29, 0.4])
a_size = st.one_of(st.integers(1, 5), st.integers(50, 200), st.integers(50, 200))


@settings(max_examples=300)
@given(
    classes=st.dictionaries(
        st.one_of(st.just(ALL), st.integers(1, ALL)), a_size, min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**31),
    weights=st.one_of(
        st.tuples(usual, usual, usual), st.tuples(unusual, unusual, unusual).filter(any)
    ),
    validation=a_fraction,
    test=a_fraction,
)
def test_every_split_is_an_exact_partition(
    classes: dict[int, int], seed: int, weights, validation, test
) -> None:
    prompts = dict(enumerate(bits for bits, size in classes.items() for _ in range(size)))
    exact = [Fraction(str(weight)) for weight in weights]
    held_out = [Fraction(str(test)), Fraction(str(validation))]
    quotas = {}
    for bits, size in classes.items():
        usable = [weight if bits & 1 << phase else 0 for phase, weight in enumerate(exact)]
        rest = [
            (1 - sum(held_out)) * weight / sum(usable) if any(usable) else None for weight in usable
        ]
        quotas[bits] = [None if share is None else size * share for share in held_out + rest]
    wanted = [part for part, share in enumerate([test, validation, *weights]) if share > 0]
    options = {
        "seed": seed,
        "weights": weights,
        "validation_fraction": validation,
        "test_fraction": test,
    }
    try:
        parts = dict(
            zip(prompts, split(list(prompts), list(prompts.values()), **options), strict=True)
        )
    except DataError as error:
        # Correct only if a class can serve no phase with a weight.
        assert "weight 0" in error.message
        assert any(None in quota for quota in quotas.values())
        return
    counts = Counter((bits, parts[prompt]) for prompt, bits in prompts.items())
    for bits, quota in quotas.items():
        assert all(
            abs(counts[bits, part] - exact_size) < 1
            for part, exact_size in zip(PARTS[:-1], quota, strict=True)  # none is held back
        )
    able = reduce(or_, prompts.values(), 0)
    served = {part for part in wanted if part < 2 or able & 1 << part - 2}
    found = {PARTS.index(part) for part in parts.values()}
    assert found <= served
    for part in served - found:  # its quotas are so small that they may be rounded to 0
        assert all(quota[part] < 1 for quota in quotas.values())
    # Neither the order nor repetitions matter, even if a repeated row serves fewer phases.
    rows = [*prompts.items(), *((prompt, bits & SFT) for prompt, bits in prompts.items())]
    random.Random(seed).shuffle(rows)
    again = split([prompt for prompt, _ in rows], [bits for _, bits in rows], **options)
    assert again == [parts[prompt] for prompt, _ in rows]


# --- a share of a source
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "fraction", "expected"),
    [
        (10, 1, 10),
        (10, 0, 0),
        (10, 0.34, 3),
        (10, 0.36, 4),
        (10, 0.25, 3),  # 2.5: a half is rounded upwards
        (90, 0.35, 32),  # 31.5, of which floats make 31.499999999999996
        (10, 0.001, 1),  # never none
        (0, 0.5, 0),
    ],
)
def test_a_fraction_is_of_the_distinct_prompts(
    prompts: int, fraction: float, expected: int
) -> None:
    chosen = fraction_of(
        keys_of([*range(prompts), *range(prompts), *range(prompts)]), fraction, seed=0
    )
    assert chosen.dtype == np.bool_
    assert chosen.tolist() == chosen[:prompts].tolist() * 3
    assert chosen.sum() == 3 * expected


def test_a_fraction_selects_the_first_prompts_by_sha256_of_seed_and_key() -> None:
    # printf 'fraction\n0\naaaaaaaaaaaaaaaa' | sha256sum, and so on.
    # Seed 0: a 1346, b 1fd2, c 4bce, d b7a9. Seed 1: c 3ff1, d ed60, a f437, b f8be.
    assert fraction_of(keys_of("abcd"), 0.25, seed=0).tolist() == [True, False, False, False]
    assert fraction_of(keys_of("abcd"), 0.75, seed=0).tolist() == [True, True, True, False]
    assert fraction_of(keys_of("abcd"), 0.5, seed=1).tolist() == [False, False, True, True]


@given(
    prompts=st.lists(st.integers(0, 40)),
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    seed=st.integers(0, 2**31),
)
def test_a_smaller_fraction_is_part_of_a_larger_one(
    prompts: list[int], fractions: list[float], seed: int
) -> None:
    smaller, larger = (fraction_of(keys_of(prompts), fraction, seed) for fraction in fractions)
    assert not (smaller & ~larger).any()


# --- repeated keys
# ---------------------------------------------------------------------------------


def test_first_rows() -> None:
    assert first_rows(keys_of("babcab")).tolist() == [0, 1, 0, 3, 1, 0]
    assert first_rows(keys_of("")).tolist() == []


def test_keys_are_compared_in_every_byte() -> None:
    # The keys differ in the first byte, in the last byte, and by a zero byte at the end.
    prompts = [0x01 << 120, 0x02 << 120, 0x01, 0x02, 0x0100, 0, 0x01]
    assert first_rows(keys_of(prompts)).tolist() == [0, 1, 2, 3, 4, 5, 2]
