"""JaQuAD by lmqg: Japanese questions about paragraphs of Wikipedia.

Ushio et al. 2022, "Generative Language Models for Paragraph-Level Question Generation". The repositories need loading
scripts; the hub's own conversion to Parquet is read. As in DeepSpeed-Chat, the answer to a question is the text that
holds it, not the few words of the column `answer`.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    PassedOverError,
    Row,
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
        raise PassedOverError("the paragraph has no question")
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
