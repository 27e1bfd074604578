"""Argilla's mixes and UltraFeedback: two rated dialogues as lists of messages."""

from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

PRIME = Message("user", "Name a prime.")
DIALOGUE = (PRIME, Message("assistant", "Seven."), Message("user", "A greater one."))
TIE = Unused("the two answers have the same score", bad=False)
RATINGS = {
    "HuggingFaceH4/ultrafeedback_binarized": ("score_chosen", "score_rejected"),
    "argilla/dpo-mix-7k": ("chosen_rating", "rejected_rating"),
    "argilla/ultrafeedback-binarized-preferences-cleaned": ("chosen-rating", "rejected-rating"),
    "argilla/distilabel-capybara-dpo-7k-binarized": ("rating_chosen", "rating_rejected"),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceH4/ultrafeedback_binarized", [Example((PRIME,), "Seven.", "Eight."), TIE]),
        ("argilla/dpo-mix-7k", [Example(DIALOGUE, "Eleven.", "Nine."), TIE]),
        (
            "argilla/ultrafeedback-binarized-preferences-cleaned",
            [Example((PRIME,), "Seven.", "Eight.")],
        ),
        ("argilla/distilabel-capybara-dpo-7k-binarized", [Example(DIALOGUE, "Eleven.", "Nine.")]),
        (
            "argilla/distilabel-intel-orca-dpo-pairs",
            [
                Example((Message("system", "You are an AI assistant."), PRIME), "Seven.", "Eight."),
                Example((PRIME,), "Seven.", "Eight."),
                TIE,
            ],
        ),
    ],
)
def test_rows(records, name: str, expected: list[Example | Unused]) -> None:
    assert records(name) == expected


def test_a_system_message_stays(records, source_rows) -> None:
    row = source_rows["argilla/dpo-mix-7k"][1] | {"rejected_rating": 7.0}
    assert records("argilla/dpo-mix-7k", row) == [
        Example(
            (Message("system", "Be brief."), Message("user", "Hi")),
            "Hello.",
            "I wish you a very good day.",
        )
    ]


@pytest.mark.parametrize("name", RATINGS)
def test_equal_ratings_are_skipped(records, source_rows, name: str) -> None:
    equal = dict.fromkeys(RATINGS[name], 3)
    assert records(name, source_rows[name][0] | equal) == [TIE]


@pytest.mark.parametrize("name", RATINGS)
@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("chosen", "Seven.", "column 'chosen' is str, not a list"),
        ("rejected", [], "column 'rejected' is not a list of messages"),
        (
            "rejected",
            [{"role": "user", "content": "a"}],
            "the dialogue does not end with the assistant",
        ),
        (
            "rejected",
            [{"role": "assistant", "content": "a"}],
            "the dialogues differ before the last answer",
        ),
    ],
)
def test_what_does_not_parse(
    records, source_rows, name: str, column: str, value: object, reason: str
) -> None:
    assert records(name, source_rows[name][0] | {column: value}) == [Unused(reason)]
