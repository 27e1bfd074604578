"""Sources with one column for the question and one for the answer."""

from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

POST = (
    "SUBREDDIT: r/relationships\n\nTITLE: My friend is late\n\nPOST: He is always late.\n\nTL;DR:"
)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("wangrui6/Zhihu-KOL", [("怎么说服男朋友买烤箱", "先请他吃一次烤鸡。")]),
        (
            "databricks/databricks-dolly-15k",
            [
                (
                    "When did Virgin Australia start operating?\n\nIt commenced services on 31 "
                    "August 2000.",
                    "On 31 August 2000.",
                ),
                ("Which is a species of fish? Tope or Rope", "Tope"),
            ],
        ),
        (
            "tatsu-lab/alpaca",
            [
                ("Identify the odd one out.\n\nTwitter, Instagram, Telegram", "Telegram"),
                ("Name a colour.", "Blue."),
                ("Draw a tree.", ""),
            ],
        ),
        ("trl-lib/tldr", [(POST, "My friend is always late, what now?")]),
        ("lmqg/qg_jaquad", [("富士山の標高は何メートルか。", "標高は3776メートルである。")]),
        (
            "lmqg/qag_jaquad",
            [
                (
                    "富士山の標高は何メートルか。",
                    "富士山は日本の山である。標高は3776メートルである。",
                )
            ],
        ),
    ],
)
def test_rows(records, name: str, pairs: list[tuple[str, str]]) -> None:
    assert records(name) == [Example((Message("user", asked),), answer) for asked, answer in pairs]


def test_summaries_compared(records) -> None:
    assert records("trl-lib/tldr-preference") == [
        Example((Message("user", POST),), "Friend is always late.", "I have a friend.")
    ]


def test_hc3_takes_the_first_person(records) -> None:
    assert records("Hello-SimpleAI/HC3-Chinese") == [
        Example((Message("user", "什么是通货膨胀"),), "就是东西越来越贵。"),
        Unused("no person has answered the question", bad=False),
    ]


@pytest.mark.parametrize(
    ("name", "column", "value", "fault"),
    [
        (
            "wangrui6/Zhihu-KOL",
            "RESPONSE",
            None,
            Unused("column 'RESPONSE' is NoneType, not a string"),
        ),
        ("tatsu-lab/alpaca", "input", None, Unused("column 'input' is NoneType, not a string")),
        (
            "databricks/databricks-dolly-15k",
            "context",
            3,
            Unused("column 'context' is int, not a string"),
        ),
        (
            "trl-lib/tldr",
            "completion",
            None,
            Unused("column 'completion' is NoneType, not a string"),
        ),
        ("lmqg/qg_jaquad", "sentence", None, Unused("column 'sentence' is NoneType, not a string")),
        ("lmqg/qag_jaquad", "questions", [], Unused("the paragraph has no question", bad=False)),
        ("lmqg/qag_jaquad", "questions", "a", Unused("column 'questions' is str, not a list")),
        (
            "Hello-SimpleAI/HC3-Chinese",
            "human_answers",
            [None],
            Unused("an item of column 'human_answers' is not a string"),
        ),
    ],
)
def test_faults(records, source_rows, name: str, column: str, value: object, fault: Unused) -> None:
    assert records(name, source_rows[name][0] | {column: value}) == [fault]
