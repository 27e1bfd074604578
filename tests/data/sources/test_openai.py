from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused
from rlhf_pipeline.data.sources.column_maps import parse_webgpt as parse

NAME = "openai/webgpt_comparisons"


def test_the_higher_score_is_chosen_and_citations_are_removed(records) -> None:
    assert records(NAME) == [
        Example(
            (Message("user", "Why is the sky blue?"),),
            "Air scatters blue light (Rayleigh) more than red.",
            "Because of the sea.",
        ),
        Unused("the two answers have the same score", bad=False),
    ]


@pytest.mark.parametrize(
    ("cited", "plain"),
    [
        ("So it is [1][2].", "So it is."),
        ("So it is [1,2, 13] today.", "So it is today."),
        ("[4] says so.", " says so."),
        ("x[0] (see [note]) [a1] f(1)", "x (see [note]) [a1] f(1)"),
    ],
)
def test_only_numbers_in_brackets_are_citations(source_rows, cited: str, plain: str) -> None:
    assert parse(source_rows[NAME][0] | {"answer_1": cited}).chosen == plain


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("question", "Why?", "column 'question' is str, not an object"),
        ("question", {"id": "5p3xkw"}, "column 'full_text' is missing"),
        ("score_0", None, "column 'score_0' is not a finite number"),
        ("score_1", float("nan"), "column 'score_1' is not a finite number"),
        ("answer_0", None, "column 'answer_0' is NoneType, not a string"),
    ],
)
def test_what_does_not_parse(records, source_rows, column: str, value: object, reason: str) -> None:
    assert records(NAME, source_rows[NAME][0] | {column: value}) == [Unused(reason)]
