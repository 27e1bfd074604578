"""The report of the split; true answers, of which none is missing unseen."""

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.phase_files import PARTS
from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.split_report import headline, print_summary
from rlhf_pipeline.errors import DataError


def asked(prompt, *answers, reference=None):
    return Example((Message("user", prompt),), *answers, reference=reference)


def test_token_counts_and_percentiles(write_records, prepare, load):
    # "~" is one token, " " and <|end|> are two more: responses of 3 to 12 tokens, all in
    # SFT's training set. Nearest rank of ten values: p50 the 5th (7), p90 the 9th (11), p99 the
    # 10th (12); their sum is 75.
    rows = [asked(f"Question {n}?", "~" * (n + 1), "No.") for n in range(10)]
    report = prepare(write_records("own", *rows), only="sft")
    tokens = report["files"]["sft/train.arrow"]["tokens"]
    assert tokens["response_ids"] == {"p50": 7, "p90": 11, "p99": 12, "max": 12, "total": 75}
    assert headline(report)["data/tokens"] == 75 + tokens["prompt_ids"]["total"]
    assert load("ppo/train.arrow") == []


def test_lengths_are_those_before_the_limit(write_records, prepare):
    rows = [asked("Why?", "~" * length, "^") for length in (1, 1, 300)]
    report = prepare(
        write_records("own", *rows), only="reward_model", over_long_responses="truncate"
    )
    assert report["lengths"]["response"] == {
        "limit": 200, "texts": 6, "longer": 1, "total": 317, "max": 302, "p50": 3, "p90": 302,
        "p99": 302,
    }  # fmt: skip
    assert report["lengths"]["prompt"]["texts"] == 3


def test_the_report(write_records, prepare, ten):
    repeated = [ten[0], ten[1], asked("Question 1?", "Other.", "Answers.")]
    own = write_records("own", *ten, Unused("a tie", bad=False), Unused("empty"))
    more = write_records("more", *repeated)
    sources = [{"name": "files", "path": "a/own.jsonl"}, {"name": "files", "path": "b/own.jsonl"}]
    report = prepare(own, more, sources=sources, max_bad_fraction=0.1)
    assert list(report) == [
        "sources", "distinct_prompts", "conversations", "serves", "unserved", "without_reference",
        "files", "overlap", "lengths", "pretraining", "settings", "examples",
    ]  # fmt: skip
    assert list(report["sources"]) == ["files (own.jsonl)", "files (own.jsonl) #2"]
    first, second = report["sources"].values()
    parts = {"test": 1, "validation": 1, "sft": 2, "reward_model": 3, "ppo": 3}
    nothing = dict.fromkeys(
        ("left_out_by_fraction", "duplicates_merged", "repeats_of_held_out", "near_duplicates",
         "without_reference"), 0,
    )  # fmt: skip
    bad, skipped = {"empty": 1}, {"a tie": 1}
    assert first == nothing | {"rows": 12, "bad": bad, "skipped": skipped, "parts": parts}
    (part,) = (part for part, rows in second["parts"].items() if rows)
    own_parts = dict.fromkeys(parts, 0) | {part: 1}
    changes = {"rows": 3, "duplicates_merged": 2, "bad": {}, "skipped": {}, "parts": own_parts}
    assert second == nothing | changes
    assert report["distinct_prompts"] == report["conversations"] == parts
    assert report["serves"] == [["sft", "reward_model", "ppo"]] and report["unserved"] == []
    counts = {"ppo/train.arrow": 3, "ppo/validation.arrow": 1, "evaluation/test.arrow": 1}
    assert report["without_reference"] == {
        path: {"files (own.jsonl)": count} for path, count in counts.items()
    }
    assert len(report["overlap"]) == 10 and not any(report["overlap"].values())
    assert len(report["files"]) == 9
    columns = {"rows", "duplicates_merged", "dropped", "truncated", "tokens"}
    assert set(report["files"]["sft/train.arrow"]) == columns
    assert report["pretraining"] is None
    assert report["settings"] == {
        "weights": [2, 4, 4], "validation_fraction": 0.1, "test_fraction": 0.1,
        "near_duplicates": "drop", "without_reference": "error", "over_long_prompts": "error",
        "over_long_responses": "error", "sft_loss": "response",
    }  # fmt: skip


def test_every_row_of_a_source_is_accounted_for(write_records, prepare, ten):
    tie, odd = Unused("a tie", bad=False), Unused("odd", bad=False)
    first = write_records("first", *ten, *ten, Unused("empty"), tie, tie)
    second = write_records("second", *ten, asked("Question 0?", "Yes."), odd)
    sources = [
        {"name": "files", "path": "first.jsonl", "fraction": 0.4},
        {"name": "files", "path": "second.jsonl", "phases": ("reward_model",)},
    ]
    report = prepare(first, second, sources=sources, only="reward_model", max_bad_fraction=0.1)
    unservable = "none of the phases that may use the source can use the record"
    one, two = report["sources"].values()
    assert (one["rows"], one["bad"], one["skipped"]) == (23, {"empty": 1}, {"a tie": 2})
    names = "left_out_by_fraction", "duplicates_merged"
    assert [*map(one.get, names), one["parts"]["reward_model"]] == [12, 0, 8]
    assert (two["rows"], two["bad"], two["skipped"]) == (12, {}, {"odd": 1, unservable: 1})
    assert [*map(two.get, names), two["parts"]["reward_model"]] == [0, 4, 6]


def test_headline(write_records, prepare, ten):
    own = write_records("own", *ten, Unused("a tie", bad=False))
    metrics = headline(prepare(own, write_records("more", ten[0], ten[1])))
    assert all(type(value) is float for value in metrics.values())
    assert metrics.pop("data/tokens") > 0
    assert {name.removeprefix("data/"): value for name, value in metrics.items()} == {
        "sft_train_rows": 2, "sft_validation_rows": 1, "reward_model_train_rows": 3,
        "reward_model_validation_rows": 1, "ppo_train_rows": 3, "ppo_validation_rows": 1,
        "evaluation_test_rows": 1, "kto_train_rows": 0, "kto_validation_rows": 0,
        "rows": 13, "distinct_prompts": 10, "bad_rows": 0, "duplicates_merged": 2,
        "near_duplicates": 0, "dropped_rows": 0, "truncated_texts": 0,
    }  # fmt: skip


def test_a_prompt_in_two_parts_is_an_error(write_records, prepare, monkeypatch, ten):
    def broken(*arguments):
        plan = blend(*arguments)
        moved = plan.parts.copy()
        last = np.flatnonzero(plan.parts == PARTS.index("reward_model"))[-1]
        moved[last] = PARTS.index("test")
        return replace(plan, parts=moved)

    blend = module.blend
    monkeypatch.setattr(module, "blend", broken)
    again = [asked(f"QUESTION {n}?", "Other.", "Answers.") for n in range(10)]
    with pytest.raises(AssertionError, match=r"^parts share .*'test and reward_model': 1"):
        prepare(write_records("own", *ten, *again))


def test_the_first_row_of_each_phase_shows_its_learned_tokens(write_records, prepare):
    prompt = Message("user", "Hi"), Message("assistant", "Yo."), Message("user", "Why?")
    own = write_records("own", Example(prompt, "So.", "No."))
    assert prepare(own, only="sft", sft_loss="assistant")["examples"]["sft"] == {
        "prompt": "\n\nHuman: Hi\n\nAssistant:",
        "response": " Yo.<|end|>\n\nHuman: Why?\n\nAssistant: So.<|end|>",
        "learned": " Yo.<|end|> So.<|end|>",
    }
    assert prepare(own, out="pairs", only="reward_model")["examples"]["reward_model"] == {
        "prompt": "\n\nHuman: Hi\n\nAssistant: Yo.<|end|>\n\nHuman: Why?\n\nAssistant:",
        "chosen": " So.<|end|>",
        "rejected": " No.<|end|>",
    }


def test_the_terminal():
    fates = ("rows", "bad", "skipped", "left_out_by_fraction", "duplicates_merged",
             "repeats_of_held_out", "near_duplicates")  # fmt: skip
    sources = {
        "hub": (160_800, {"no answer": 12, "a control token": 1_310}, {}, 0, 0, 37, 30),
        "mine": (10_000, {}, {"the scores are equal": 800}, 4_600, 12, 0, 0),
    }
    names = ("rows", "duplicates_merged", "dropped", "truncated")
    files = {
        "sft/train.arrow": (34_000, 0, {"answer too long": 100, "prompt": 900}, {"prompts": 40}),
        "sft/validation.arrow": (3_400, 0, {}, {}),
        "evaluation/test.arrow": (1_990, 666, {"prompt": 10}, {}),
    }
    report = {
        "sources": {key: dict(zip(fates, row, strict=True)) for key, row in sources.items()},
        "files": {key: dict(zip(names, row, strict=True)) for key, row in files.items()},
        "settings": {"near_duplicates": "keep"},
        "unserved": ["ppo"],
    }
    console = Console(file=io.StringIO(), width=80)
    print_summary(report, console)
    words = " ".join(console.file.getvalue().split())
    for fact in (
        "170,800 rows read, 1,322 bad, 800 skipped, 4,600 beyond fractions, 12 merged, 37 near",
        "sft 34,000 3,400 0 1,000 40",
        "evaluation 1,990 0 666 10 0",
        "No row can serve ppo: weight 0",
        "WARNING: training includes 30 near duplicates of held-out prompts",
    ):
        assert fact in words


def test_a_split_that_is_all_test_serves_no_phase_and_says_nothing(write_records, prepare):
    own = write_records("own", *(asked(f"Question {n}?") for n in range(9)))
    source = {"name": "files", "path": "own.jsonl", "phases": ["test"]}
    report = prepare(own, sources=[source], test_fraction=0)
    assert report["serves"] == report["unserved"] == []
    assert report["conversations"]["test"] == 9


SUMS = range(10)
PAIRS = [asked(f"What is {n} + {n}?", f"It is {2 * n}.", "I do not know.") for n in SUMS]
BARE = [asked(f"What is {n} + {n}?") for n in SUMS]
ANSWERED = [asked(f"what is {n} + {n}? ", reference=str(2 * n)) for n in SUMS]
SAME_PAIRS = [replace(pair, reference=str(2 * n)) for n, pair in enumerate(PAIRS)]


PROMPTS = ("ppo/train", "ppo/validation", "evaluation/test")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_a_merge_keeps_the_true_answer(order, write_records, prepare, load):
    sources = [PAIRS, BARE, ANSWERED, SAME_PAIRS]
    folders = [write_records(f"source{index}", *sources[index]) for index in order]
    report = prepare(*folders)
    rows = [row for file in PROMPTS for row in load(f"{file}.arrow")]
    assert report["without_reference"] == {}
    assert [row["reference"] for row in rows] == [
        str(2 * int(re.findall(r"\d+", row["messages"][0]["content"])[0])) for row in rows
    ]
    assert len(rows) == 3 + 1 + 1


def test_two_true_answers_of_a_prompt_are_refused(write_records, prepare):
    first = write_records("first", *ANSWERED, asked("What is 3 + 3?", reference="6"))
    wrong = [asked(f"What is {n} + {n}?", reference=f"{n}{n}") for n in (3, 4)]
    with pytest.raises(
        DataError,
        match=r"^split: found 2 prompts with different true answers, expected one each\. For "
        r"example, 'What is 3 \+ 3\?' has '33' \(second:0\) and '6'\. Fix: correct the answers, or "
        r"remove columns\.reference of one source$",
    ):
        prepare(first, write_records("second", *wrong))


def test_prompts_without_a_true_answer_can_leave_ppo_and_the_evaluation(
    write_records, prepare, load
):
    other = [asked(f"Why {n}?", "Because.", "No idea.") for n in range(10)]
    demonstrations = [asked(f"How {n}?", "So.") for n in range(10)]
    kinds = {"other": other, "demonstrations": demonstrations, "answered": ANSWERED}
    folders = [write_records(name, *rows) for name, rows in kinds.items()]
    report = prepare(*folders, without_reference="drop")
    assert report["without_reference"] == {}
    # Ten sums: one each for test and validation, eight for PPO, which alone can use them.
    files = [load(f"{name}.arrow") for name in PROMPTS]
    assert [*map(len, files)] == [8, 1, 1]
    assert all(row["reference"] for rows in files for row in rows)
    # Of the other 20 conversations, two each are held out. 2 : 4 of the 8 comparisons that remain
    # are 2.7 and 5.3.
    assert len(load("sft/train.arrow")) == 8 + 3
    assert len(load("reward_model/train.arrow")) == 5
    counts = [source["without_reference"] for source in report["sources"].values()]
    assert counts == [10, 10, 0]
    # The two of the test leave all files.
    skipped = [source["skipped"] for source in report["sources"].values()]
    reason = "its prompt has no true answer (split.without_reference is drop)"
    assert sum(map(Counter, skipped), Counter()) == {reason: 2}


def test_the_reward_of_the_page_rewards_right_answers_alone():
    page = (Path(__file__).parents[2] / "docs/ppo.md").read_text()
    (function,) = re.findall(r"```python\n(.*?)```", page[page.index("## Rewards") :], re.DOTALL)
    defined = {}
    exec(function, defined)
    answers = ["17 + 25 = 42.", "17 + 25 = 43."]
    assert defined["exact_match"]([[]] * 2, answers, ["42", "42"]) == [1.0, 0.0]
