from __future__ import annotations

import re

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.adapter import (
    MalformedRowError,
    SkippedRowError,
    compared,
    items,
    messages,
    number,
    outcome,
    preferred,
    question,
    text,
    turns,
)

ASKED = (Message("user", "Why?"),)


@pytest.mark.parametrize(("value", "expected"), [(3, 3), (-0.5, -0.5), ("2.5", 2.5), (" 4", 4)])
def test_numbers_also_as_text(value: object, expected: float) -> None:
    assert number({"a": value}, "a") == expected


@pytest.mark.parametrize("value", ["three", "", None, [3], float("inf"), "nan", 10**400])
def test_no_number(value: object) -> None:
    with pytest.raises(MalformedRowError, match=r"^column 'a' is not a finite number$"):
        number({"a": value}, "a")


def test_a_missing_number() -> None:
    with pytest.raises(MalformedRowError, match=r"^column 'a' is missing$"):
        number({}, "a")


def test_items_are_all_of_one_type() -> None:
    assert items({"a": ["x", "y"]}, "a", str) == ["x", "y"]
    with pytest.raises(MalformedRowError, match=r"^an item of column 'a' is not a string$"):
        items({"a": ["x", None]}, "a", str)


def test_a_question_of_parts() -> None:
    assert question("Why?") == ASKED
    assert question("Why?", " ", "Because\n") == (Message("user", "Why?\n\nBecause\n"),)


def test_the_higher_score_is_preferred() -> None:
    assert preferred(ASKED, ("a", "b"), (2, 1)) == Example(ASKED, "a", "b")
    assert preferred(ASKED, ("a", "b"), (-1.5, -1)) == Example(ASKED, "b", "a")
    with pytest.raises(SkippedRowError, match=r"^the two answers have the same score$"):
        preferred(ASKED, ("a", "b"), (1, 1))


def test_messages_in_both_formats() -> None:
    expected = (Message("system", "Be kind."), Message("user", "Why?"), Message("assistant", "So."))
    contents = [message.content for message in expected]
    for roles in (
        ("system", "user", "assistant"),
        ("system", "prompter", "bot"),
        ("system", "human", "gpt"),
    ):
        openai = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        sharegpt = [
            {"from": role, "value": content} for role, content in zip(roles, contents, strict=True)
        ]
        assert messages(openai, "chosen") == messages(sharegpt, "chosen") == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("Why?", "column 'chosen' is not a list of messages"),
        ([], "column 'chosen' is not a list of messages"),
        (["Why?"], "a message in column 'chosen' is not an object with role and content"),
        ([{"role": "user"}], "column 'content' is missing"),
        ([{"from": "human"}], "column 'value' is missing"),
        (
            [{"role": "judge", "content": "a"}],
            "a message's role is not one of system, user, human, .*",
        ),
    ],
)
def test_no_messages(value: object, reason: str) -> None:
    with pytest.raises(MalformedRowError, match=f"^{reason}"):
        messages(value, "chosen")


def test_dialogues_that_differ_in_the_last_answer() -> None:
    assert compared(
        (*ASKED, Message("assistant", "a")), (*ASKED, Message("assistant", "b"))
    ) == Example(ASKED, "a", "b")


def test_turns_and_the_text_before_them() -> None:
    marker = re.compile(r"\[(User|ASSISTANT)\]")
    assert turns(" Be kind. [User] Why? \n[ASSISTANT]So.[User]", marker) == (
        "Be kind.",
        (Message("user", "Why?"), Message("assistant", "So."), Message("user", "")),
    )
    assert turns("Why?", marker) == ("Why?", ())


def test_outcome_distinguishes_bad_and_skipped_rows() -> None:
    assert outcome(text, {"a": "b"}, "a") == "b"
    assert outcome(text, {}, "a") == Unused("column 'a' is missing")
    assert outcome(lambda row: "parsed", Unused("not JSON")) == Unused("not JSON")
    assert outcome(preferred, ASKED, ("a", "b"), (1, 1)) == Unused(
        "the two answers have the same score", bad=False
    )
