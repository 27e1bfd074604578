"""Alpaca: instructions and answers written by text-davinci-003.

Taori et al. 2023, "Stanford Alpaca: An Instruction-following LLaMA model". A few rows have no
output and count as bad: set `max_bad_fraction` to 0.001.
"""

from __future__ import annotations

from rlhf_pipeline.data.records import Example
from rlhf_pipeline.data.sources.adapter import Row, Source, question, text


def parse(row: Row) -> Example:
    """Prompt: the instruction and its input, if any. Answer: the output."""
    return Example(question(text(row, "instruction"), text(row, "input")), text(row, "output"))


SOURCES = (
    Source(
        name="tatsu-lab/alpaca",
        kind="demonstrations",
        description="instructions and answers written by a model, about 52,000; a few without an "
        "answer",
        columns=("instruction", "input", "output"),
        parse=parse,
    ),
)
