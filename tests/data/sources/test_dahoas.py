from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

PROMPT = (
    Message("user", "How do I clean fish?"),
    Message("assistant", "With a sharp knife."),
    Message("user", "And then?"),
)


def test_dialogues(records) -> None:
    assert records("Dahoas/rm-static") == [
        Example(PROMPT, "Rinse it in cold water.", "I don't know.")
    ]
    assert records("Dahoas/full-hh-rlhf") == [
        Example(PROMPT, "Wash your hands.", "Nothing more\nto do.")
    ]


def test_instructions(records) -> None:
    assert records("Dahoas/synthetic-instruct-gptj-pairwise") == [
        Example(
            (Message("user", "Describe the steps to change a tire."),),
            "Loosen the nuts, jack up the car, swap the wheel.",
            "Call a friend. I am not sure.",
        )
    ]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("prompt", "How do I clean fish?", "the dialogue does not start with a turn"),
        ("prompt", "\n\nHuman: Hi", "the dialogue does not end with the assistant"),
        (
            "chosen",
            " Sure.\n\nHuman: And?\n\nAssistant: So.",
            "the dialogues differ before the last answer",
        ),
        ("rejected", 3, "column 'rejected' is int, not a string"),
    ],
)
def test_what_does_not_parse(records, source_rows, column: str, value: object, reason: str) -> None:
    row = source_rows["Dahoas/rm-static"][0]
    assert records("Dahoas/rm-static", row | {column: value}) == [Unused(reason)]
