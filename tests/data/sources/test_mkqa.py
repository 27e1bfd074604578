from __future__ import annotations

import pytest

from rlhf_pipeline.data.records import Example, Message, Unused

NONE = Unused("the question has no short answer", bad=False)


def test_each_language_has_its_questions_and_answers(records) -> None:
    assert records("mkqa-Chinese") == [
        Example(
            (Message("user", "《i hear you knocking but you can't come in》是谁演唱的"),),
            "戴维·埃德蒙兹",
        ),
        NONE,
    ]
    assert records("mkqa-Japanese") == [
        Example(
            (Message("user", "「 I hear you knocking」は誰が歌っていますか"),), "デイヴ・エドモンズ"
        ),
        NONE,
    ]


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("answers", {"ja": []}, NONE),
        ("answers", {"zh_cn": []}, Unused("column 'ja' is missing")),
        ("answers", {"ja": ["a"]}, Unused("an item of column 'ja' is not an object")),
        ("answers", {"ja": [{"text": 3}]}, Unused("column 'text' is int, not a string")),
        ("queries", {"zh_cn": "a"}, Unused("column 'ja' is missing")),
    ],
)
def test_faults(records, source_rows, column: str, value: object, fault: Unused) -> None:
    assert records("mkqa-Japanese", source_rows["mkqa-Japanese"][0] | {column: value}) == [fault]
