from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

NAME = "stanfordnlp/SHP"


def test_the_label_names_the_chosen_one(records) -> None:
    prompt = (
        Message(
            "user", "In an interview right before receiving the 2013 Nobel prize, what did he say?"
        ),
    )
    first, second = "That he would not get a job today.", "Who knows?"
    assert records(NAME) == [Example(prompt, first, second), Example(prompt, second, first)]


def test_a_label_from_csv(records, source_rows) -> None:
    row = source_rows[NAME][0] | {"labels": "0"}
    assert records(NAME, row)[0].chosen == "Who knows?"


@pytest.mark.parametrize(
    ("label", "reason"),
    [(2, "column 'labels' is neither 0 nor 1"), ("A", "column 'labels' is not a finite number")],
)
def test_another_label(records, source_rows, label: object, reason: str) -> None:
    assert records(NAME, source_rows[NAME][0] | {"labels": label}) == [Unused(reason)]
