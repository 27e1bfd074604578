"""How rows are divided among parts: all rows of one conversation together, in exact shares; and
near duplicates: texts whose 5-grams of words have a Jaccard similarity of at least 0.8."""

import hashlib
import random
from collections import Counter
from fractions import Fraction
from functools import reduce
from itertools import count
from operator import or_

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import assign, blend, first_rows, fraction_of, near_duplicates
from rlhf_pipeline.data.phase_files import PARTS, TABLES
from rlhf_pipeline.data.record_files import examples
from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.errors import DataError

NOTHING_HELD_OUT = {"validation_fraction": 0, "test_fraction": 0}
ONLY_SFT = NOTHING_HELD_OUT | {"weights": (1, 0, 0)}
UNUSED = "-"
TABLE = {table.path: table for table in TABLES}


def asked(content, *answers):
    return Example((Message("user", content),), *answers)


def compared(*prompts):
    return [asked(f"Question {prompt}?", "Yes.", "No.") for prompt in prompts]


def split_config(sources=({},), **changes):
    return SplitConfig(sources=sources, max_prompt_tokens=1, max_response_tokens=1, **changes)


@pytest.fixture
def make(write_records):
    """Blends sources; each is a list of examples, or such a list with settings of the source."""
    blends = count()

    def make(*sources, seed=0, unsound=(), **split):
        pairs = [source if isinstance(source, tuple) else (source, {}) for source in sources]
        named = [{"name": "files", "path": f"{next(blends)}"} | config for _, config in pairs]
        tables = [examples(write_records(str(next(blends)), *rows)) for rows, _ in pairs]
        sound = [~np.isin(np.arange(table.num_rows), unsound) for table in tables]
        return blend(split_config(named, **split), tables, sound, seed)

    return make


def parts(plan):
    assert plan.parts.dtype == np.int8
    return [UNUSED if part == -1 else PARTS[part] for part in plan.parts]


def rows(plan, path):
    return np.flatnonzero(plan.rows(TABLE[path])[0]).tolist()


def test_a_prompt_of_two_sources_lands_in_one_part(make):
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


def test_an_example_that_an_earlier_source_has_is_merged(make):
    """Repeats within a source stay."""
    first = [asked("a", "Yes.", "No."), asked("b", "Yes.", "No."), asked("a", "Yes.", "No.")]
    second = [
        asked("A ", " Yes.", "No.\n"),  # row 3, equals row 0 in another case
        asked("a", "Yes.", "Never."),
        asked("b", "No.", "Yes."),
        *[asked("a", "Yes.")] * 2,
        asked("a", "Yes.", "No."),  # row 8
    ]
    third = [asked("c"), asked("b", "Yes.", "No."), asked("b", "No.", "Yes.")]  # rows 9, 10 and 11
    plan = make(first, second, third, **NOTHING_HELD_OUT, weights=(1, 0, 1))
    assert [row for row, part in enumerate(parts(plan)) if part == UNUSED] == [3, 8, 10, 11]
    assert plan.counts["merged"] == [0, 2, 2]
    assert plan.starts == [0, 3, 9, 12]


def test_a_copy_stays_if_the_earlier_row_is_beyond_its_fraction(make):
    plan = make((compared(*range(10)), {"fraction": 0.3}), compared(*range(10)), **ONLY_SFT)
    used = [part != UNUSED for part in parts(plan)]
    assert sum(used[:10]) == 3
    assert used[10:] == [not earlier for earlier in used[:10]]
    assert (plan.counts["left_out"], plan.counts["merged"]) == ([7, 0], [0, 3])


def test_a_merged_row_adds_the_phases_of_its_source(make):
    for_sft = (compared(*range(4)), {"phases": ("sft",)})
    for_ppo = (compared(*range(4), "more"), {"phases": ("ppo",)})
    plan = make(for_sft, for_ppo, **NOTHING_HELD_OUT, weights=(1, 0, 1))
    assert plan.counts["merged"] == [0, 4]
    # Either phase may use four prompts, so each gets two; the fifth serves PPO alone.
    assert Counter(parts(plan)) == {"sft": 2, "ppo": 3, UNUSED: 4}
    assert len(rows(plan, "sft/train.arrow")) == 2
    assert len(rows(plan, "ppo/train.arrow")) == 3


def test_each_kind_of_example_goes_to_the_phases_it_can_serve(make):
    demonstrations = [asked(f"Demonstration {n}", "Yes.") for n in range(10)]
    bare = [asked(f"Bare {n}") for n in range(10)]
    plan = make(
        demonstrations, compared(*range(10)), bare, validation_fraction=0.1, test_fraction=0.1
    )
    # Each ten separately: 1 for test, 1 for validation; the quotas of 8 comparisons by 2:4:4 are
    # 1.6, 3.2 and 3.2.
    assert [Counter(parts(plan)[ten : ten + 10]) for ten in (0, 10, 20)] == [
        {"test": 1, "validation": 1, "sft": 8},
        {"test": 1, "validation": 1, "sft": 2, "reward_model": 3, "ppo": 3},
        {"test": 1, "validation": 1, "ppo": 8},
    ]
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
        "reward_model_own/train.arrow": {1: 3},
        "reward_model_own/validation.arrow": {1: 1},
    }


def test_comparisons_are_held_back_for_the_second_reward_model(make):
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


def test_rows_that_leave_without_a_true_answer_are_not_counted_as_unservable(make):
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


def test_ppo_and_test_files_keep_the_first_row_of_a_prompt(make):
    first = [asked("a", "1", "2"), asked("b", "1", "2"), asked("A", "3", "4")]
    second = [asked("b"), asked("c"), asked("a", "5", "6"), asked("c", "1", "2")]
    plan = make(first, second, **NOTHING_HELD_OUT, weights=(0, 0, 1))
    assert rows(plan, "ppo/train.arrow") == [0, 1, 4]
    assert plan.rows(TABLE["ppo/train.arrow"])[1] == 4
    assert rows(plan, "sft/train.arrow") == []
    # The test set contains the same rows of these prompts, for any phase.
    plan = make(
        first, second, compared("x"), validation_fraction=0, test_fraction=0.75, weights=(1, 0, 0)
    )
    assert len(rows(plan, "evaluation/test.arrow")) == plan.distinct(plan.prompt_keys, "test") == 3


def test_excluded_rows_have_no_effect(make):
    """An excluded row neither adds phases to its prompt nor merges a later copy."""
    plan = make(
        compared("a", "a", "b"), compared("a"), unsound=[0], **NOTHING_HELD_OUT, weights=(0, 0, 1)
    )
    assert parts(plan) == [UNUSED, "ppo", "ppo", UNUSED]
    assert rows(plan, "ppo/train.arrow") == [1, 2]
    assert all(not any(numbers) for name, numbers in plan.counts.items() if name != "unanswered")


HALF_HELD_OUT = {"validation_fraction": 0, "test_fraction": 0.5}
LONG = "please write me a short poem about the sea and the wind for my"  # 14 words


def dialogue(*turns, system=None):
    roles = ("user", "assistant") * len(turns)
    start = () if system is None else (Message("system", system),)
    return Example((*start, *map(Message, roles, turns)), "Yes.", "No.")


def test_a_dialogue_and_its_continuations_are_in_one_part(make):
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


def test_a_system_message_begins_another_conversation(make):
    rows = [dialogue("Hello", system=f"You are {n}.") for n in range(4)] + [dialogue("Hello")]
    plan = make(rows, **HALF_HELD_OUT, weights=(1, 0, 0), near_duplicates="keep")
    assert plan.distinct(plan.conversation_keys, "test") == 3  # 2.5, rounded in favour of test
    # Their first turns are equal, so those in training are near duplicates of those in the test.
    assert plan.counts["near"] == [2]


def test_near_duplicates_of_held_out_prompts_leave_training(make):
    rows = [dialogue(f"{LONG} {one}") for one in ("friend", "brother")] + compared(*range(18))
    plans = {
        choice: make(rows, **HALF_HELD_OUT, weights=(1, 0, 0), seed=1, near_duplicates=choice)
        for choice in ("drop", "keep")
    }
    # "... wind for my friend" has 11 grams, 10 of them also in the other: 10 / 12 = 0.83.
    assert sorted(parts(plans["keep"])[:2]) == ["sft", "test"]
    assert sorted(parts(plans["drop"])[:2]) == [UNUSED, "test"]
    assert plans["drop"].counts["near"] == plans["keep"].counts["near"] == [1]
    assert Counter(parts(plans["drop"])) == {"test": 10, "sft": 9, UNUSED: 1}


def test_near_duplicates_of_test_prompts_leave_validation(make):
    rows = [dialogue(f"{LONG} {one}") for one in ("friend", "brother", "sister")]
    plan = make(rows, validation_fraction=0.3, test_fraction=0.3, weights=(1, 0, 0))
    assert sorted(parts(plan)) == [UNUSED, UNUSED, "test"]  # one of them was for validation
    assert plan.counts["near"] == [2]


def test_a_test_source_is_the_evaluation_and_leaves_no_trace_in_training(make):
    benchmark = [dialogue("Question 0?"), dialogue("A question of its own?"), asked(f"{LONG} dog")]
    near = dialogue(f"{LONG} cat")
    longer = dialogue("question 1?", "Tell me more.", "More.")
    given = [*compared(*range(6)), longer, near, dialogue("QUESTION 0?", "What?", "That.")]
    plan = make(given, (benchmark, {"phases": ("test",)}), **NOTHING_HELD_OUT, weights=(1, 0, 0))
    found = parts(plan)
    assert found[9:] == ["test", "test", "test"]
    assert found[:9] == [UNUSED, *["sft"] * 6, UNUSED, UNUSED]
    fates = {"in_test": [2, 0], "near": [1, 0], "unservable": [0, 0]}
    assert plan.counts | fates == plan.counts
    assert rows(plan, "evaluation/test.arrow") == [9, 10, 11]


SFT, REWARD_MODEL, PPO = 0b001, 0b010, 0b100
ALL = SFT | REWARD_MODEL | PPO


def keys_of(prompts):
    """The key of letter "a" is sixteen bytes "a"; the key of a number is its sixteen bytes."""
    rows = [
        prompt.encode() * 16 if isinstance(prompt, str) else prompt.to_bytes(16, "big")
        for prompt in prompts
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)


def assigned(prompts, serves=ALL, *, seed=0, **options):
    """The parts of the rows, by name."""
    bits = np.broadcast_to(np.array(serves, np.uint8), len(prompts))
    parts = assign(keys_of(prompts), bits, split_config(**options), seed)
    return [PARTS[part] for part in parts]


def test_decimals_are_exact():
    # The float 0.3 is slightly less than 3/10, which would decide a tie of remainders.
    # Quotas 9 * 3/6 = 4.5, 3 and 1.5: of the two remainders, the first is rounded up.
    found = Counter(assigned("abcdefghi", weights=(0.3, 0.2, 0.1), **NOTHING_HELD_OUT))
    assert found == {"sft": 5, "reward_model": 3, "ppo": 1}
    # Quotas 5 * 3/10 = 1.5 and 3.5: test comes first.
    options = {"weights": (0, 1, 0), "validation_fraction": 0, "test_fraction": 0.3}
    assert Counter(assigned("abcde", **options)) == {"test": 2, "reward_model": 3}


@pytest.mark.parametrize(
    ("serves", "weights", "named"),
    [(SFT, (0, 4, 4), "sft"), (SFT | PPO, (0, 1, 0), "sft, ppo"), (0, (2, 4, 4), "none")],
)
def test_prompts_for_phases_without_weight_are_an_error(serves, weights, named):
    prompts = [*range(10), 10, 11, 11, 12]
    with pytest.raises(DataError) as error:
        assigned(prompts, [ALL] * 10 + [serves] * 4, weights=weights, **NOTHING_HELD_OUT)
    assert error.value.message.startswith(
        "split: found 3 distinct conversations that serve only phases of weight 0 "
        f"({named}), in synthetic, expected some for a phase in use: "
    )
    assert " Fix: name these columns" in error.value.message


def test_the_split_is_that_of_earlier_versions():
    """The expected digests were computed by sorting plain lists, without numpy."""
    numbers = [number * number % 1009 for number in range(2000)]
    digests = [list(hashlib.sha256(b"%d" % number).digest()[:16]) for number in numbers]
    keys = np.array(digests, np.uint8)
    serves = np.array([[0b111, 0b001, 0b111, 0b100][number % 4] for number in numbers], np.uint8)
    parts = assign(keys, serves, split_config(test_fraction=0.1), seed=7)
    assert hashlib.sha256(parts.tobytes()).hexdigest()[:16] == "c39c4d3e7f7002e9"
    chosen = fraction_of(keys, 0.3, seed=7)
    assert hashlib.sha256(chosen.tobytes()).hexdigest()[:16] == "bf74de3d40a0a884"


usual = st.sampled_from([1, 2, 4, 6, 0.1, 0.2, 0.3, 2.718281828])
unusual = st.one_of(usual, st.just(0), st.floats(1e-9, 1e300))
a_fraction = st.sampled_from([0, 0, 0.02, 0.1, 0.29, 0.4])
a_size = st.one_of(st.integers(1, 5), st.integers(50, 200), st.integers(50, 200))


@settings(max_examples=300, deadline=None)
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
def test_every_split_is_an_exact_partition(classes, seed, weights, validation, test):
    prompts = dict(enumerate(bits for bits, size in classes.items() for _ in range(size)))
    exact = [Fraction(str(weight)) for weight in weights]
    held_out = [Fraction(str(test)), Fraction(str(validation))]
    quotas = {}
    for bits, size in classes.items():
        usable = [weight if bits & 1 << phase else 0 for phase, weight in enumerate(exact)]
        rest = (1 - sum(held_out)) / (sum(usable) or 1)
        shares = [*held_out, *(rest * weight for weight in usable)]
        quotas[bits] = [size * share for share in shares] if any(usable) else []
    wanted = [part for part, share in enumerate([test, validation, *weights]) if share > 0]
    options = {"weights": weights, "validation_fraction": validation, "test_fraction": test}
    options["seed"] = seed
    try:
        parts = assigned(list(prompts), list(prompts.values()), **options)
    except DataError as error:
        # Correct only if a class can serve no phase with a weight.
        assert "weight 0" in error.message
        assert not all(quotas.values())
        return
    counts = Counter(zip(prompts.values(), parts, strict=True))
    for bits, quota in quotas.items():
        for part, exact_size in zip(PARTS[:-1], quota, strict=True):  # none is held back
            assert abs(counts[bits, part] - exact_size) < 1
    able = reduce(or_, prompts.values(), 0)
    served = {part for part in wanted if part < 2 or able & 1 << part - 2}
    found = {PARTS.index(part) for part in parts}
    assert found <= served
    for part in served - found:  # its quotas are so small that they may be rounded to 0
        assert all(quota[part] < 1 for quota in quotas.values())
    # Neither the order nor repetitions matter, even if a repeated row serves fewer phases.
    rows = [*prompts.items(), *((prompt, bits & SFT) for prompt, bits in prompts.items())]
    random.Random(seed).shuffle(rows)
    again = assigned([prompt for prompt, _ in rows], [bits for _, bits in rows], **options)
    assert again == [parts[prompt] for prompt, _ in rows]


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
def test_a_fraction_is_of_the_distinct_prompts(prompts, fraction, expected):
    chosen = fraction_of(keys_of([*range(prompts)] * 3), fraction, seed=0)
    assert chosen.dtype == np.bool_
    assert chosen.tolist() == chosen[:prompts].tolist() * 3
    assert chosen.sum() == 3 * expected


@given(
    prompts=st.lists(st.integers(0, 40)),
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    seed=st.integers(0, 2**31),
)
def test_a_smaller_fraction_is_part_of_a_larger_one(prompts, fractions, seed):
    smaller, larger = (fraction_of(keys_of(prompts), fraction, seed) for fraction in fractions)
    assert not (smaller & ~larger).any()


def test_the_first_row_of_a_key_which_is_compared_in_every_byte():
    assert first_rows(keys_of("babcab")).tolist() == [0, 1, 0, 3, 1, 0]
    assert first_rows(keys_of("")).tolist() == []
    # The keys differ in the first byte, in the last byte, and by a zero byte at the end.
    prompts = [0x01 << 120, 0x02 << 120, 0x01, 0x02, 0x0100, 0, 0x01]
    assert first_rows(keys_of(prompts)).tolist() == [0, 1, 2, 3, 4, 5, 2]


TWELVE = "a b c d e f g h i j k l"  # 8 grams: a-e, b-f, ... h-l


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("A  B c\nd e f g h i j k l", True),  # case and white space do not count
        (f"{TWELVE} m n", True),  # 8 of 10: exactly 0.8
        (f"{TWELVE} m n o", False),  # 8 of 11
        ("a b c d e f g h i j", False),  # 6 of 8
        ("l k j i h g f e d c b a", False),
    ],
)
def test_the_similarity_of_word_grams_decides(text, near):
    found = near_duplicates([text], ["nothing like it at all here", TWELVE])
    assert found.tolist() == [near]
    assert near_duplicates([TWELVE], [text]).tolist() == [near]


def test_a_text_of_few_words_must_be_equal():
    texts = ["What is 17 + 25?", "what IS  17 - 25?", "17"]
    assert near_duplicates(texts, ["What is 17 - 25?"]).tolist() == [False, True, False]
    assert near_duplicates(["x"], []).tolist() == [False]
    assert near_duplicates([], ["x"]).tolist() == []


def test_the_search_finds_what_comparing_all_pairs_finds():
    # Texts of a cyclic alphabet: "0 1 2 ... 29" and the same with some words replaced.
    words = [str(number) for number in range(30)]
    texts = [
        " ".join("-" if index == at else word for index, word in enumerate(words[:length]))
        for length in range(20, 31)
        for at in (0, 1, 5, 99)
    ]

    def grams(text):
        split = text.split()
        return {tuple(split[start : start + 5]) for start in range(len(split) - 4)}

    for known in texts:
        one = grams(known)
        similarities = [len(one & grams(text)) / len(one | grams(text)) for text in texts]
        expected = [similarity >= 0.8 for similarity in similarities]
        assert near_duplicates(texts, [known]).tolist() == expected


def test_an_instruction_that_all_prompts_share_does_not_count():
    instruction = " ".join(f"step{number}" for number in range(200))
    rest = "{0}a {0}b {0}c {0}d {0}e {0}f {0}g {0}h {0}i {0}j"
    held_out = [f"{instruction} {rest.format(number)}" for number in range(101)]
    texts = [f"{instruction} {rest.format(number)}" for number in (7, 500)]
    # With its 196 grams, 206 and 206 would share 196 of 216.
    assert near_duplicates(texts, held_out).tolist() == [True, False]
    # 100 prompts are too few to tell an instruction from a repeated prompt.
    assert near_duplicates(texts[1:], held_out[:100]).tolist() == [True]
    assert near_duplicates([instruction], [*held_out, instruction]).tolist() == [True]
