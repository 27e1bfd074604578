"""HC3-Chinese: questions with answers by people (read) and by ChatGPT (not read).

Guo et al. 2023, "How Close is ChatGPT to Human Experts?". The repository needs a loading script, so
the hub's Parquet conversion is read. Subset "all" contains all other subsets.
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


def parse(row: Row) -> Example:
    """The question and the first answer by a person."""
    answers = items(row, "human_answers", str)
    if not answers:
        raise SkippedRowError("no person has answered the question")
    return Example(question(text(row, "question")), answers[0])


SOURCES = (
    Source(
        name="Hello-SimpleAI/HC3-Chinese",
        kind="demonstrations",
        description="Chinese: questions of seven fields answered by people, about 12,900",
        columns=("question", "human_answers"),
        parse=parse,
        revision=CONVERTED,
        subset="all",
    ),
)
