from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

CHINESE, JAPANESE = "Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12"


def test_the_first_passage_of_either_kind(records) -> None:
    assert records(CHINESE) == [
        Example(
            (Message("user", "第一个发现太阳系的人是谁"),),
            "哥白尼提出了日心说。",
            "月球是地球的卫星。",
        ),
        Unused("no passage answers the query", bad=False),
    ]


def test_without_another_passage_it_is_a_demonstration(records) -> None:
    assert records(JAPANESE) == [
        Example((Message("user", "富士山の高さは"),), "富士山の標高は3776メートルである。")
    ]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("positive_passages", ["a"], "an item of column 'positive_passages' is not an object"),
        ("positive_passages", [{"docid": "1"}], "column 'text' is missing"),
        ("negative_passages", None, "column 'negative_passages' is NoneType, not a list"),
        ("query", None, "column 'query' is NoneType, not a string"),
    ],
)
def test_what_does_not_parse(records, source_rows, column: str, value: object, reason: str) -> None:
    assert records(CHINESE, source_rows[CHINESE][0] | {column: value}) == [Unused(reason)]
