"""Anthropic's helpful and harmless comparisons: two dialogues that differ in the last answer.

Bai et al. 2022, "Training a Helpful and Harmless Assistant with Reinforcement Learning from Human
Feedback". Other publishers of the same dialogues store the prompt in a separate column. Their
adapters use the same function, so a prompt is the same in all data sets.
"""

from __future__ import annotations

import re

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import MalformedRowError, Row, Source, compared, text, turns

_TURN = re.compile(r"\n\n(Human|Assistant):")


def dialogue(written: str) -> tuple[Message, ...]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..."; MalformedRowError for any other start."""
    before, found = turns(written, _TURN)
    if before or not found:
        raise MalformedRowError("the dialogue does not start with a turn")
    return found


def parse(row: Row) -> Example:
    """Prompt: the shared turns. Answers: the last turn of each dialogue."""
    return compared(dialogue(text(row, "chosen")), dialogue(text(row, "rejected")))


SOURCES = (
    Source(
        name="Anthropic/hh-rlhf",
        kind="comparisons",
        description="Anthropic's helpful and harmless dialogues, about 161,000 comparisons",
        columns=("chosen", "rejected"),
        parse=parse,
    ),
)
