"""The report of the split, its metrics, its examples and its summary in the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rlhf_pipeline.config.stages import unused_rows
from rlhf_pipeline.data import split as module
from rlhf_pipeline.data.phase_files import PARTS
from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.split_report import headline, print_summary

Prepare = Callable[..., dict[str, Any]]


def asked(prompt: str, *answers: str) -> Example:
    return Example((Message("user", prompt),), *answers)


def test_token_counts_and_percentiles(write_records, prepare: Prepare, load) -> None:
    # "~" is one token, " " and <|end|> are two more: responses of 3 to 12 tokens, all in
    # SFT's training set. Nearest rank of ten values: p50 the 5th (7), p90 the 9th (11), p99 the
    # 10th (12); their sum is 75.
    rows = [asked(f"Question {n}?", "~" * (n + 1), "No.") for n in range(10)]
    report = prepare(write_records("own", *rows), only="sft")
    tokens = report["files"]["sft/train.arrow"]["tokens"]
    assert tokens["response_ids"] == {"p50": 7, "p90": 11, "p99": 12, "max": 12, "total": 75}
    assert headline(report)["data/tokens"] == 75 + tokens["prompt_ids"]["total"]
    assert load("ppo/train.arrow") == []


def test_lengths_are_those_before_the_limit(write_records, prepare: Prepare) -> None:
    rows = [asked("Why?", "~" * length, "^") for length in (1, 1, 300)]
    report = prepare(
        write_records("own", *rows), only="reward_model", over_long_responses="truncate"
    )
    assert report["lengths"]["response"] == {
        "limit": 200, "texts": 6, "longer": 1, "total": 317, "max": 302, "p50": 3, "p90": 302,
        "p99": 302,
    }  # fmt: skip
    assert report["lengths"]["prompt"]["texts"] == 3


def test_the_report(write_records, prepare: Prepare, ten) -> None:
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


def test_every_row_of_a_source_is_accounted_for(write_records, prepare: Prepare, ten) -> None:
    first = write_records(
        "first", *ten, *ten, Unused("empty"), Unused("a tie", bad=False), Unused("a tie", bad=False)
    )
    demonstration = asked("Question 0?", "Yes.")
    second = write_records("second", *ten, demonstration, Unused("odd", bad=False))
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


def test_headline(write_records, prepare: Prepare, ten) -> None:
    own = write_records("own", *ten, Unused("a tie", bad=False))
    metrics = headline(prepare(own, write_records("more", ten[0], ten[1])))
    assert metrics.pop("data/tokens") > 0
    written = {"sft_train": 2, "sft_validation": 1, "reward_model_train": 3,
               "reward_model_validation": 1, "ppo_train": 3, "ppo_validation": 1,
               "evaluation_test": 1, "kto_train": 0, "kto_validation": 0}  # fmt: skip
    assert metrics == {f"data/{name}_rows": count for name, count in written.items()} | {
        "data/rows": 13, "data/distinct_prompts": 10, "data/bad_rows": 0,
        "data/duplicates_merged": 2, "data/near_duplicates": 0, "data/dropped_rows": 0,
        "data/truncated_texts": 0,
    }  # fmt: skip
    assert all(type(value) is float for value in metrics.values())


def test_a_prompt_in_two_parts_is_an_error(
    write_records, prepare: Prepare, monkeypatch: pytest.MonkeyPatch, ten
) -> None:
    def broken(*arguments: Any) -> Any:
        plan = blend(*arguments)
        moved = plan.parts.copy()
        moved[np.flatnonzero(plan.parts[10:] == PARTS.index("reward_model"))[0] + 10] = PARTS.index(
            "test"
        )
        return replace(plan, parts=moved)

    blend = module.blend
    monkeypatch.setattr(module, "blend", broken)
    again = [asked(f"QUESTION {n}?", "Other.", "Answers.") for n in range(10)]
    with pytest.raises(
        AssertionError, match=r"^parts share conversations: .*'test and reward_model': 1"
    ):
        prepare(write_records("own", *ten, *again))


def test_the_first_row_of_each_phase_shows_its_learned_tokens(
    write_records, prepare: Prepare
) -> None:
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


def test_the_terminal() -> None:
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


def test_the_weights_that_a_run_is_advised_to_set_give_it_all_rows(
    write_records, prepare: Prepare
) -> None:
    """SFT alone on pairs, which the default weights also keep for the other phases."""
    own = write_records("own", *(asked(f"Question {n}?", "Yes.", "No.") for n in range(40)))
    text = unused_rows(prepare(own), {"split", "sft"}, {})
    assert text is not None and "trains on 19% of the training conversations" in text
    weights = json.loads(text.partition("set split.weights to ")[2])
    report = prepare(own, out="all", weights=weights)
    assert (
        report["conversations"]["sft"] == 32 and unused_rows(report, {"split", "sft"}, {}) is None
    )


def test_a_split_that_is_all_test_serves_no_phase_and_says_nothing(
    write_records, prepare: Prepare
) -> None:
    own = write_records("own", *(asked(f"Question {n}?") for n in range(9)))
    source = {"name": "files", "path": "own.jsonl", "phases": ["test"]}
    report = prepare(own, sources=[source], test_fraction=0)
    assert report["serves"] == report["unserved"] == []
    assert report["conversations"]["test"] == 9
