"""Rows that are dropped, or cut, on the way to the prepared files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.split_report import headline
from rlhf_pipeline.errors import DataError

Prepare = Callable[..., dict[str, Any]]


def asked(prompt: str, *answers: str) -> Example:
    return Example((Message("user", prompt),), *answers)


@pytest.mark.parametrize(
    "forged",
    [
        asked("a<|end|>b", "c", "d"),
        asked("a", "b<|end|>", "c"),
        asked("a", "b", "<|pad|>"),
        Example((Message("system", "<|end|>"), Message("user", "a")), "b", "c"),
    ],
)
def test_a_control_token_in_the_data_is_a_bad_row(
    write_records, prepare: Prepare, forged, load, ten
) -> None:
    own = write_records("own", forged, *ten)
    with pytest.raises(
        DataError,
        match=r"(?s)source files \(0\.jsonl\): 1 of 11 rows .*own:0: .* control token "
        r"<\|(end|pad)\|>",
    ):
        prepare(own)
    report = prepare(own, out="allowed", max_bad_fraction=0.1)  # 1 / 11 is 0.091
    (bad,) = report["sources"]["files (0.jsonl)"]["bad"].values()
    assert bad == 1
    assert headline(report)["data/bad_rows"] == 1
    written = {one["id"] for file in report["files"] for one in load(file, out="allowed")}
    assert written == {f"own:{n}" for n in range(1, 11)}


def test_prompts_that_are_equal_once_cut_stay_in_one_part(
    write_records, prepare: Prepare, load, ten
) -> None:
    long = [asked(f"{n} {'^' * 300}", "Yes.", "No.") for n in range(10)]
    report = prepare(
        write_records("own", *long, *ten),
        weights=(1, 0, 1),
        validation_fraction=0,
        test_fraction=0,
        over_long_prompts="truncate",
    )
    cut = {
        phase: sum(len(one["prompt_ids"]) == 200 for one in load(f"{phase}/train.arrow"))
        for phase in ("sft", "ppo")
    }
    (phase, kept), (other, none) = sorted(cut.items(), key=lambda item: -item[1])
    assert kept > 0 and none == 0
    assert report["files"][f"{other}/train.arrow"]["dropped"] == {
        f"prompt that, once cut, equals one of {phase}": 10 - kept
    }


def test_unused_answers_are_not_checked(write_records, prepare: Prepare) -> None:
    own = write_records("own", asked("Why?", "~" * 300, "^" * 400))
    report = prepare(own, only="ppo")
    assert report["files"]["ppo/train.arrow"]["rows"] == 1
    assert report["lengths"]["response"]["texts"] == 0
    with pytest.raises(DataError, match="the chosen answer has 302"):
        prepare(own, out="sft", only="sft")
    sft = prepare(own, out="longer", only="sft", max_response_tokens=302)
    assert (sft["lengths"]["response"]["texts"], sft["lengths"]["response"]["max"]) == (1, 302)


def test_a_phase_without_a_row_to_validate_on_is_refused(write_records, prepare: Prepare) -> None:
    """The quotas of two comparisons are 0.4 for validation, 0.8 for SFT and 0.8 for the reward
    model, so 0, 1 and 1."""
    comparisons = [asked(f"Compared {n}?", "Yes.", "No.") for n in range(2)]
    few = write_records("few", *comparisons, *(asked(f"Shown {n}?", "So.") for n in range(10)))
    with pytest.raises(
        DataError,
        match=r"^reward_model/validation\.arrow: found 0 rows, .* Fix: add data, raise",
    ):
        prepare(few, weights=(1, 1, 0), validation_fraction=0.2, test_fraction=0)


@pytest.mark.parametrize(
    ("prompts", "held_out", "empty"),
    [
        (0, 0, "sft/train.arrow, reward_model/train.arrow, ppo/train.arrow"),
        (1, 0, "sft/train.arrow, ppo/train.arrow"),  # quotas 0.2, 0.4 and 0.4
        (2, 0, "sft/train.arrow"),
        (4, 0.02, "evaluation/test.arrow, sft/validation.arrow, reward_model/validation.arrow, "
         "ppo/validation.arrow"),
    ],
)  # fmt: skip
def test_a_file_that_gets_no_prompt_is_refused_before_texts_are_read(
    write_records, prepare: Prepare, prompts: int, held_out: float, empty: str
) -> None:
    given = write_records("few", *(asked(f"{n}?", "~" * 300, "No.") for n in range(prompts)))
    with pytest.raises(DataError, match=f"^{empty}: found 0 rows, expected at least 1. Fix: add"):
        prepare(given, weights=(2, 4, 4), validation_fraction=held_out, test_fraction=held_out)
