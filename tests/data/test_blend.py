from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend, blend
from rlhf_pipeline.data.parts import PARTS
from rlhf_pipeline.data.phase_files import TABLES
from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.errors import DataError

Make = Callable[..., Blend]
Source = tuple[list[Example], dict[str, Any]]

NOTHING_HELD_OUT: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0}
ONLY_SFT = NOTHING_HELD_OUT | {"weights": (1, 0, 0)}
UNUSED = "-"


def asked(content: str, *answers: str) -> Example:
    return Example((Message("user", content),), *answers)


def compared(*prompts: object) -> list[Example]:
    return [asked(f"Question {prompt}?", "Yes.", "No.") for prompt in prompts]


@pytest.fixture
def make(write_records) -> Make:
    """Blends sources; each is a list of examples, or such a list with settings of the source."""
    blends = count()

    def make(
        *sources: list[Example] | Source, seed: int = 0, unsound: Sequence[int] = (), **split: Any
    ) -> Blend:
        pairs = [source if isinstance(source, tuple) else (source, {}) for source in sources]
        named = [
            {"name": "files", "path": f"{index}.jsonl"} | config
            for index, (_, config) in enumerate(pairs)
        ]
        config = SplitConfig(sources=named, max_prompt_tokens=1, max_response_tokens=1, **split)
        folders = [
            write_records(f"{next(blends)}/{index}", *rows) for index, (rows, _) in enumerate(pairs)
        ]
        tables = [examples(folder) for folder in folders]
        sound = [
            np.array([row not in unsound for row in range(table.num_rows)], bool)
            for table in tables
        ]
        return blend(config, tables, sound, seed)

    return make


def parts(plan: Blend) -> list[str]:
    assert plan.parts.dtype == np.int8
    return [UNUSED if part == -1 else PARTS[part] for part in plan.parts]


def rows(plan: Blend, path: str) -> list[int]:
    (table,) = (table for table in TABLES if table.path == path)
    return np.flatnonzero(plan.rows(table)[0]).tolist()


def duplicates(plan: Blend, path: str) -> int:
    (table,) = (table for table in TABLES if table.path == path)
    return plan.rows(table)[1]


# --- one prompt, one part -------------------------------------------------------------------------


def test_a_prompt_of_two_sources_lands_in_one_part(make: Make) -> None:
    again = [asked(f" QUESTION  {n}? ", "Other.", "Answers.") for n in range(20)]
    plan = make(compared(*range(20)), again, validation_fraction=0.1, test_fraction=0.1)
    found = parts(plan)
    # 20 prompts: 2 and 2 are held out; 16 by 2:4:4 are 3.2, 6.4, 6.4.
    assert Counter(found[:20]) == {
        "test": 2,
        "validation": 2,
        "sft": 3,
        "reward_model": 7,
        "ppo": 6,
    }
    assert found[20:] == found[:20]
    assert (plan.starts, plan.merged, plan.left_out) == ([0, 20, 40], [0, 0], [0, 0])
    assert [plan.distinct_prompts(part) for part in PARTS] == [2, 2, 3, 7, 6]


def test_the_seed_decides(make: Make) -> None:
    seven, again, eight = (parts(make(compared(*range(100)), seed=seed)) for seed in (7, 7, 8))
    assert seven == again
    assert seven != eight
    assert Counter(seven) == Counter(eight)


def test_without_a_usable_prompt_the_parts_are_empty(make: Make) -> None:
    with pytest.raises(
        DataError, match=r"^sft, reward_model, ppo: found no prompt among 0 distinct prompts"
    ):
        make([], [], **NOTHING_HELD_OUT)
    with pytest.raises(
        DataError, match=r"^sft, reward_model, ppo: found no prompt among 0 distinct prompts"
    ):
        make(([asked("a", "demonstration")], {"phases": ("ppo",)}), **NOTHING_HELD_OUT)


# --- what an earlier source has -------------------------------------------------------------------


def test_an_example_that_an_earlier_source_has_is_merged(make: Make) -> None:
    first = [asked("a", "Yes.", "No."), asked("b", "Yes.", "No.")]
    second = [
        asked("A ", " Yes.", "No.\n"),  # row 2, equals row 0 in another case
        asked("a", "Yes.", "Never."),
        asked("b", "No.", "Yes."),
        asked("a", "Yes."),
        asked("a", "Yes.", "No."),  # row 6
    ]
    third = [asked("c"), asked("b", "Yes.", "No."), asked("b", "No.", "Yes.")]  # rows 7, 8 and 9
    plan = make(first, second, third, **NOTHING_HELD_OUT, weights=(1, 0, 1))
    assert [row for row, part in enumerate(parts(plan)) if part == UNUSED] == [2, 6, 8, 9]
    assert plan.merged == [0, 2, 2]
    assert plan.starts == [0, 2, 7, 10]


def test_repeats_within_a_source_stay(make: Make) -> None:
    plan = make(compared("a", "a", "b", "a"), compared("b", "c", "c"), **ONLY_SFT)
    assert parts(plan) == ["sft"] * 4 + [UNUSED, "sft", "sft"]
    assert plan.merged == [0, 1]
    assert plan.distinct_prompts("sft") == 3


def test_a_copy_stays_if_the_earlier_row_is_beyond_its_fraction(make: Make) -> None:
    plan = make((compared(*range(10)), {"fraction": 0.3}), compared(*range(10)), **ONLY_SFT)
    used = [part != UNUSED for part in parts(plan)]
    assert sum(used[:10]) == 3
    assert used[10:] == [not earlier for earlier in used[:10]]
    assert (plan.left_out, plan.merged) == ([7, 0], [0, 3])


def test_a_copy_stays_if_no_phase_may_use_the_earlier_row(make: Make) -> None:
    bare = [asked("a"), asked("b")]
    plan = make(
        (bare, {"phases": ("sft", "reward_model")}), bare, **NOTHING_HELD_OUT, weights=(0, 0, 1)
    )
    assert parts(plan) == [UNUSED, UNUSED, "ppo", "ppo"]
    assert (plan.unservable, plan.merged) == ([2, 0], [0, 0])


def test_a_merged_row_adds_the_phases_of_its_source(make: Make) -> None:
    for_sft = (compared(*range(4)), {"phases": ("sft",)})
    for_ppo = (compared(*range(4), "more"), {"phases": ("ppo",)})
    plan = make(for_sft, for_ppo, **NOTHING_HELD_OUT, weights=(1, 0, 1))
    assert plan.merged == [0, 4]
    # Either phase may use four prompts, so each gets two; the fifth serves PPO alone.
    assert Counter(parts(plan)) == {"sft": 2, "ppo": 3, UNUSED: 4}
    assert len(rows(plan, "sft/train.arrow")) == 2
    assert len(rows(plan, "ppo/train.arrow")) == 3


# --- who may use what -----------------------------------------------------------------------------


def test_each_kind_of_example_goes_to_the_phases_it_can_serve(make: Make) -> None:
    demonstrations = [asked(f"Demonstration {n}", "Yes.") for n in range(10)]
    bare = [asked(f"Bare {n}") for n in range(10)]
    plan = make(
        demonstrations, compared(*range(10)), bare, validation_fraction=0.1, test_fraction=0.1
    )
    found = parts(plan)
    # Each ten separately: 1 for test, 1 for validation; the quotas of 8 comparisons by 2:4:4 are
    # 1.6, 3.2 and 3.2.
    assert Counter(found[:10]) == {"test": 1, "validation": 1, "sft": 8}
    assert Counter(found[10:20]) == {
        "test": 1,
        "validation": 1,
        "sft": 2,
        "reward_model": 3,
        "ppo": 3,
    }
    assert Counter(found[20:]) == {"test": 1, "validation": 1, "ppo": 8}
    tens = {table.path: Counter(row // 10 for row in rows(plan, table.path)) for table in TABLES}
    assert tens == {
        "sft/train.arrow": {0: 8, 1: 2},
        "sft/validation.arrow": {0: 1, 1: 1},
        "reward_model/train.arrow": {1: 3},
        "reward_model/validation.arrow": {1: 1},
        "ppo/train.arrow": {1: 3, 2: 8},
        "ppo/validation.arrow": {1: 1, 2: 1},
        "evaluation/test.arrow": {0: 1, 1: 1, 2: 1},
    }


def test_a_phase_reads_only_the_rows_that_it_can_use(make: Make) -> None:
    both = [asked("a", "Demonstrated."), asked("a"), asked("a", "Yes.", "No.")]
    assert rows(make(both, **ONLY_SFT), "sft/train.arrow") == [0, 2]
    assert rows(make(both, **NOTHING_HELD_OUT, weights=(0, 1, 0)), "reward_model/train.arrow") == [
        2
    ]
    plan = make(both, **NOTHING_HELD_OUT, weights=(0, 0, 1))
    assert rows(plan, "ppo/train.arrow") == [1]
    assert duplicates(plan, "ppo/train.arrow") == 1  # the comparison, which PPO could use too


def test_phases_restrict_a_source(make: Make) -> None:
    restricted = (compared(*range(10)), {"phases": ("sft", "ppo")})
    plan = make(restricted, compared(*range(10, 20)), **NOTHING_HELD_OUT)
    found = parts(plan)
    assert Counter(found[:10]) == {"sft": 3, "ppo": 7}  # 2:4 of 10 are 3.3 and 6.7
    assert Counter(found[10:]) == {"sft": 2, "reward_model": 4, "ppo": 4}
    assert plan.left_out == [0, 0]


def test_phases_restrict_rows_even_if_another_source_has_the_prompt(make: Make) -> None:
    plan = make(
        (compared("a"), {"phases": ("reward_model",)}),
        [asked("Question a?", "Another.", "Answer.")],
        **NOTHING_HELD_OUT,
        weights=(1, 0, 0),
    )
    assert parts(plan) == ["sft", "sft"]
    assert rows(plan, "sft/train.arrow") == [1]


# --- how much of a source -------------------------------------------------------------------------


def test_a_fraction_of_the_distinct_prompts_with_all_their_rows(make: Make) -> None:
    thrice = [asked(f"Question {n}?", f"Yes {k}.", "No.") for n in range(10) for k in range(3)]
    plan = make(compared(*range(100, 104)), (thrice, {"fraction": 0.4}), **ONLY_SFT)
    used = [part != UNUSED for part in parts(plan)][4:]
    assert plan.left_out == [0, 18]
    assert sum(used) == 12
    assert used == [used[3 * n] for n in range(10) for _ in range(3)]


def test_rows_beyond_the_fraction_are_not_counted_as_unservable(make: Make) -> None:
    demonstrations = [asked(f"Demonstration {n}", "Yes.") for n in range(10)]
    plan = make(compared("a"), (demonstrations, {"phases": ("ppo",), "fraction": 0.3}), **ONLY_SFT)
    assert (plan.left_out, plan.unservable) == ([0, 7], [0, 3])


def test_a_smaller_fraction_is_part_of_a_larger_one(make: Make) -> None:
    plans = (
        make((compared(*range(50)), {"fraction": fraction}), **ONLY_SFT) for fraction in (0.2, 0.5)
    )
    smaller, larger = (
        {row for row, part in enumerate(parts(plan)) if part != UNUSED} for plan in plans
    )
    assert (len(smaller), len(larger)) == (10, 25)
    assert smaller < larger


# --- several sources ------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_source_changes_nothing(make: Make, empty: int) -> None:
    full = [compared(*range(10)), (compared(*range(5, 20)), {"fraction": 0.8})]
    without = make(*full, **ONLY_SFT)
    plan = make(*full[:empty], [], *full[empty:], **ONLY_SFT)
    assert parts(plan) == parts(without)
    assert plan.starts == {0: [0, 0, 10, 25], 1: [0, 10, 10, 25], 2: [0, 10, 25, 25]}[empty]
    for counts, expected in ((plan.left_out, without.left_out), (plan.merged, without.merged)):
        assert counts.pop(empty) == 0
        assert counts == expected
    assert without.left_out == [0, 3]  # 0.8 of 15 prompts


# --- prompts that a file holds once ---------------------------------------------------------------


def test_ppo_and_test_files_keep_the_first_row_of_a_prompt(make: Make) -> None:
    first = [asked("a", "1", "2"), asked("b", "1", "2"), asked("A", "3", "4")]
    second = [asked("b"), asked("c"), asked("a", "5", "6"), asked("c", "1", "2")]
    plan = make(first, second, **NOTHING_HELD_OUT, weights=(0, 0, 1))
    assert rows(plan, "ppo/train.arrow") == [0, 1, 4]
    assert duplicates(plan, "ppo/train.arrow") == 4
    assert rows(plan, "sft/train.arrow") == []
    # The test set contains the same rows of these prompts, for any phase.
    plan = make(
        first, second, compared("x"), validation_fraction=0, test_fraction=0.75, weights=(1, 0, 0)
    )
    assert len(rows(plan, "evaluation/test.arrow")) == plan.distinct_prompts("test") == 3


def test_sft_and_reward_model_read_every_row(make: Make) -> None:
    source = [asked("a", "1", "2"), asked("a", "1", "2"), asked("a", "3", "4")]
    plan = make(source, **NOTHING_HELD_OUT, weights=(0, 1, 0))
    assert rows(plan, "reward_model/train.arrow") == [0, 1, 2]
    assert duplicates(plan, "reward_model/train.arrow") == 0


def test_excluded_rows_have_no_effect(make) -> None:
    """An excluded row neither adds phases to its prompt nor merges a later copy."""
    plan = make(
        compared("a", "a", "b"), compared("a"), unsound=[0], **NOTHING_HELD_OUT, weights=(0, 0, 1)
    )
    assert parts(plan) == [UNUSED, "ppo", "ppo", UNUSED]
    assert rows(plan, "ppo/train.arrow") == [1, 2]
    assert (plan.merged, plan.unservable, plan.left_out) == ([0, 0], [0, 0], [0, 0])
