"""OpenAI's WebGPT comparisons: long answers to questions, with scores from people.

Nakano et al. 2021, "WebGPT: Browser-assisted question-answering with human feedback". The
repository needs a loading script, so the hub's Parquet conversion is read. Answers cite sources by
number, which a model without a browser must not learn: citations are removed, other brackets stay.
"""

from __future__ import annotations

import re

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    Row,
    Source,
    field,
    number,
    preferred,
    question,
    text,
)

_CITATION = re.compile(r" ?\[\d+(?:, ?\d+)*\]")


def parse(row: Row) -> Example:
    """Choose the answer with the higher score; ties are skipped."""
    return preferred(
        question(text(field(row, "question", dict), "full_text")),
        (_CITATION.sub("", text(row, "answer_0")), _CITATION.sub("", text(row, "answer_1"))),
        (number(row, "score_0"), number(row, "score_1")),
    )


SOURCES = (
    Source(
        name="openai/webgpt_comparisons",
        kind="comparisons",
        description="long answers to questions, compared by people, about 19,600 comparisons "
        "with ties",
        columns=("question", "answer_0", "answer_1", "score_0", "score_1"),
        parse=parse,
        revision=CONVERTED,
    ),
)
