"""Dolly: instructions and answers written by employees of Databricks.

Conover et al. 2023, "Free Dolly: Introducing the World's First Truly Open Instruction-Tuned LLM".
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, question, text


def parse(row: Row) -> Example:
    """Prompt: the instruction and its context, if any. Answer: the response."""
    return Example(question(text(row, "instruction"), text(row, "context")), text(row, "response"))


SOURCES = (
    Source(
        name="databricks/databricks-dolly-15k",
        kind="demonstrations",
        description="instructions and answers written by people, about 15,000",
        columns=("instruction", "context", "response"),
        parse=parse,
    ),
)
