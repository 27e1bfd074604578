"""MKQA: 10,000 questions with short answers, translated by people.

Longpre et al. 2020, "MKQA: A Linguistically Diverse Benchmark for Multilingual Open Domain Question
Answering". The repository needs a loading script, so the hub's Parquet conversion is read. Of
several equally correct answers, the first is used.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    Row,
    SkippedRowError,
    Source,
    field,
    items,
    question,
    text,
)


def _parser(code: str) -> Callable[[Row], Example]:
    def parse(row: Row) -> Example:
        answers = items(field(row, "answers", dict), code, dict)
        if not answers or answers[0].get("text") is None:
            raise SkippedRowError("the question has no short answer")
        return Example(question(text(field(row, "queries", dict), code)), text(answers[0], "text"))

    return parse


def _source(language: str, code: str) -> Source:
    return Source(
        name=f"mkqa-{language}",
        kind="demonstrations",
        description=f"{language}: questions with short answers, 10,000 with those that have none",
        columns=("queries", "answers"),
        parse=_parser(code),
        hub="apple/mkqa",
        revision=CONVERTED,
    )


SOURCES = (_source("Chinese", "zh_cn"), _source("Japanese", "ja"))
