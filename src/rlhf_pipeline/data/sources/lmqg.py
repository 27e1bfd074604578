"""JaQuAD by lmqg: Japanese questions about paragraphs of Wikipedia.

Ushio et al. 2022, "Generative Language Models for Paragraph-Level Question Generation". The
repositories need loading scripts, so the hub's Parquet conversions are read. As in DeepSpeed-Chat,
the answer is the text that contains it, not the few words of column `answer`.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    Row,
    SkippedRowError,
    Source,
    items,
    question,
    text,
)


def parse_sentence(row: Row) -> Example:
    """A question and the sentence that answers it."""
    return Example(question(text(row, "question")), text(row, "sentence"))


def parse_paragraph(row: Row) -> Example:
    """The first question about a paragraph, and the paragraph."""
    questions = items(row, "questions", str)
    if not questions:
        raise SkippedRowError("the paragraph has no question")
    return Example(question(questions[0]), text(row, "paragraph"))


SOURCES = (
    Source(
        name="lmqg/qg_jaquad",
        kind="demonstrations",
        description="Japanese: questions with the sentence of Wikipedia that answers them",
        columns=("question", "sentence"),
        parse=parse_sentence,
        revision=CONVERTED,
    ),
    Source(
        name="lmqg/qag_jaquad",
        kind="demonstrations",
        description="Japanese: questions with the paragraph of Wikipedia that answers them",
        columns=("questions", "paragraph"),
        parse=parse_paragraph,
        revision=CONVERTED,
    ),
)
