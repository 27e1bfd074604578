from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend, blend
from rlhf_pipeline.data.phase_files import PARTS, TABLES
from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.records import Example, Message

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
    sizes = {"test": 2, "validation": 2, "sft": 3, "reward_model": 7, "ppo": 6}
    assert Counter(found[:20]) == sizes
    assert found[20:] == found[:20]
    assert plan.starts == [0, 20, 40]
    assert plan.counts["merged"] == plan.counts["left_out"] == [0, 0]
    assert [plan.distinct(plan.prompt_keys, part) for part in PARTS] == [2, 2, 3, 7, 6, 0]


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
    assert plan.counts["merged"] == [0, 2, 2]
    assert plan.starts == [0, 2, 7, 10]


def test_repeats_within_a_source_stay(make: Make) -> None:
    plan = make(compared("a", "a", "b", "a"), compared("b", "c", "c"), **ONLY_SFT)
    assert parts(plan) == ["sft"] * 4 + [UNUSED, "sft", "sft"]
    assert plan.counts["merged"] == [0, 1]
    assert plan.distinct(plan.prompt_keys, "sft") == 3


def test_a_copy_stays_if_the_earlier_row_is_beyond_its_fraction(make: Make) -> None:
    plan = make((compared(*range(10)), {"fraction": 0.3}), compared(*range(10)), **ONLY_SFT)
    used = [part != UNUSED for part in parts(plan)]
    assert sum(used[:10]) == 3
    assert used[10:] == [not earlier for earlier in used[:10]]
    assert (plan.counts["left_out"], plan.counts["merged"]) == ([7, 0], [0, 3])


def test_a_merged_row_adds_the_phases_of_its_source(make: Make) -> None:
    for_sft = (compared(*range(4)), {"phases": ("sft",)})
    for_ppo = (compared(*range(4), "more"), {"phases": ("ppo",)})
    plan = make(for_sft, for_ppo, **NOTHING_HELD_OUT, weights=(1, 0, 1))
    assert plan.counts["merged"] == [0, 4]
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
    sizes = {"test": 1, "validation": 1, "sft": 2, "reward_model": 3, "ppo": 3}
    assert Counter(found[10:20]) == sizes
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
        "kto/train.arrow": {},
        "kto/validation.arrow": {},
        "judge_model/train.arrow": {},
        "judge_model/validation.arrow": {1: 1},
    }


def test_comparisons_are_held_back_for_the_second_reward_model(make: Make) -> None:
    """Half of the reward model's conversations, with all their rows; every other part stays."""
    given = [*compared(*range(20)), *compared(*range(20))]
    usual, plan = (
        make(given, validation_fraction=0.1, test_fraction=0.1, held_back=share)
        for share in (0, 0.5)
    )
    before, after = parts(usual), parts(plan)
    own = [row for row, part in enumerate(before) if part == "reward_model"]
    held_back = [row for row in own if after[row] == "judge_model"]
    # 16 conversations by 2:4:4 are 3.2, 6.4 and 6.4; each has two rows. Half of 7 rounds to 4.
    assert (len(own), len(held_back)) == (14, 8)
    assert len({row % 20 for row in held_back}) == 4
    assert [a for row, a in enumerate(after) if row not in held_back] == [
        b for row, b in enumerate(before) if row not in held_back
    ]
    assert rows(plan, "judge_model/train.arrow") == held_back
    assert rows(plan, "reward_model/train.arrow") == [row for row in own if row not in held_back]
    validation = rows(plan, "reward_model/validation.arrow")
    assert rows(plan, "judge_model/validation.arrow") == validation != []


def test_phases_restrict_a_source(make: Make) -> None:
    restricted = (compared(*range(10)), {"phases": ("sft", "ppo")})
    plan = make(restricted, compared(*range(10, 20)), **NOTHING_HELD_OUT)
    found = parts(plan)
    assert Counter(found[:10]) == {"sft": 3, "ppo": 7}  # 2:4 of 10 are 3.3 and 6.7
    assert Counter(found[10:]) == {"sft": 2, "reward_model": 4, "ppo": 4}
    assert plan.counts["left_out"] == [0, 0]


# --- how much of a source -------------------------------------------------------------------------


def test_a_fraction_of_the_distinct_prompts_with_all_their_rows(make: Make) -> None:
    thrice = [asked(f"Question {n}?", f"Yes {k}.", "No.") for n in range(10) for k in range(3)]
    plan = make(compared(*range(100, 104)), (thrice, {"fraction": 0.4}), **ONLY_SFT)
    used = [part != UNUSED for part in parts(plan)][4:]
    assert plan.counts["left_out"] == [0, 18]
    assert sum(used) == 12
    assert used == [used[3 * n] for n in range(10) for _ in range(3)]


def test_rows_that_leave_without_a_true_answer_are_not_counted_as_unservable(make: Make) -> None:
    bare = [asked(f"Bare {n}") for n in range(3)]
    answered = [Example((Message("user", f"Sum {n}"),), reference="1") for n in range(4)]
    demonstrations = [asked("Demonstration", "Yes.")]
    plan = make(
        (bare + answered, {"phases": ("ppo",)}),
        (demonstrations + bare[:1], {"phases": ("ppo",)}),
        **NOTHING_HELD_OUT,
        weights=(0, 0, 1),
        without_reference="drop",
    )
    assert parts(plan) == [UNUSED] * 3 + ["ppo"] * 4 + [UNUSED] * 2
    fates = {"dropped": [3, 1], "unservable": [0, 1], "merged": [0, 0], "unanswered": [3, 2]}
    assert plan.counts | fates == plan.counts


# --- several sources ------------------------------------------------------------------------------


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
    assert len(rows(plan, "evaluation/test.arrow")) == plan.distinct(plan.prompt_keys, "test") == 3


def test_excluded_rows_have_no_effect(make) -> None:
    """An excluded row neither adds phases to its prompt nor merges a later copy."""
    plan = make(
        compared("a", "a", "b"), compared("a"), unsound=[0], **NOTHING_HELD_OUT, weights=(0, 0, 1)
    )
    assert parts(plan) == [UNUSED, "ppo", "ppo", UNUSED]
    assert rows(plan, "ppo/train.arrow") == [1, 2]
    assert all(not any(numbers) for name, numbers in plan.counts.items() if name != "unanswered")


# --- held out means held out ----------------------------------------------------------------------

HALF_HELD_OUT: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0.5}
LONG = "please write me a short poem about the sea and the wind for my"  # 14 words


def dialogue(*turns: str, system: str | None = None) -> Example:
    roles = ("user", "assistant") * len(turns)
    start = () if system is None else (Message("system", system),)
    return Example((*start, *map(Message, roles, turns)), "Yes.", "No.")


def test_a_dialogue_and_its_continuations_are_in_one_part(make: Make) -> None:
    rows = [
        dialogue(*[f"Opening {n}?", "Go on.", "And then?", "So.", "Why?"][: 2 * length - 1])
        for n in range(20)
        for length in (1, 2, 3)
    ]
    plan = make(rows, **HALF_HELD_OUT, weights=(1, 0, 0))
    found = parts(plan)
    assert found == [part for part in found[::3] for _ in range(3)]
    assert Counter(found) == {"test": 30, "sft": 30}
    assert plan.distinct(plan.prompt_keys, "test") == 30
    assert plan.distinct(plan.conversation_keys, "test") == 10


def test_a_system_message_begins_another_conversation(make: Make) -> None:
    rows = [dialogue("Hello", system=f"You are {n}.") for n in range(4)] + [dialogue("Hello")]
    plan = make(rows, **HALF_HELD_OUT, weights=(1, 0, 0), near_duplicates="keep")
    assert plan.distinct(plan.conversation_keys, "test") == 3  # 2.5, rounded in favour of test
    # Their first turns are equal, so those in training are near duplicates of those in the test.
    assert plan.counts["near"] == [2]


def test_near_duplicates_of_held_out_prompts_leave_training(make: Make) -> None:
    rows = [dialogue(f"{LONG} {one}") for one in ("friend", "brother")] + compared(*range(18))
    plans = {
        choice: make(rows, **HALF_HELD_OUT, weights=(1, 0, 0), seed=seed, near_duplicates=choice)
        for choice in ("drop", "keep")
        for seed in range(20)
        if sorted(parts(make(rows, **HALF_HELD_OUT, weights=(1, 0, 0), seed=seed,
                             near_duplicates="keep"))[:2]) == ["sft", "test"]
    }  # fmt: skip
    # "... wind for my friend" has 11 grams, 10 of them also in the other: 10 / 12 = 0.83.
    assert sorted(parts(plans["keep"])[:2]) == ["sft", "test"]
    assert sorted(parts(plans["drop"])[:2]) == [UNUSED, "test"]
    assert plans["drop"].counts["near"] == plans["keep"].counts["near"] == [1]
    assert Counter(parts(plans["drop"])) == {"test": 10, "sft": 9, UNUSED: 1}


def test_near_duplicates_of_test_prompts_leave_validation(make: Make) -> None:
    rows = [dialogue(f"{LONG} {one}") for one in ("friend", "brother", "sister")]
    plan = make(rows, validation_fraction=0.3, test_fraction=0.3, weights=(1, 0, 0))
    assert sorted(parts(plan)) == [UNUSED, UNUSED, "test"]  # one of them was for validation
    assert plan.counts["near"] == [2]


def test_a_test_source_is_the_evaluation_and_leaves_no_trace_in_training(make: Make) -> None:
    benchmark = [dialogue("Question 0?"), dialogue("A question of its own?"), asked(f"{LONG} dog")]
    near = dialogue(f"{LONG} cat")
    longer = dialogue("question 1?", "Tell me more.", "More.")
    rows = [*compared(*range(6)), longer, near, dialogue("QUESTION 0?", "What?", "That.")]
    plan = make(rows, (benchmark, {"phases": ("test",)}), **NOTHING_HELD_OUT, weights=(1, 0, 0))
    found = parts(plan)
    assert found[9:] == ["test", "test", "test"]
    assert found[:9] == [UNUSED, *["sft"] * 6, UNUSED, UNUSED]
    assert (plan.counts["in_test"], plan.counts["near"], plan.counts["unservable"]) == (
        [2, 0],
        [1, 0],
        [0, 0],
    )
    assert rows_of_test(plan) == [9, 10, 11]


def rows_of_test(plan: Blend) -> list[int]:
    return rows(plan, "evaluation/test.arrow")
