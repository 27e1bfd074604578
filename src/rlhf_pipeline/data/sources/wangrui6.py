"""Zhihu-KOL: questions and answers of the Chinese platform Zhihu."""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, question, text


def parse(row: Row) -> Example:
    """One question, one answer."""
    return Example(question(text(row, "INSTRUCTION")), text(row, "RESPONSE"))


SOURCES = (
    Source(
        name="wangrui6/Zhihu-KOL",
        kind="demonstrations",
        description="Chinese: questions and answers of Zhihu, about a million",
        columns=("INSTRUCTION", "RESPONSE"),
        parse=parse,
    ),
)
