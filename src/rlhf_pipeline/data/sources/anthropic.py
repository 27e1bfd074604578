"""Anthropic's helpful and harmless comparisons: both columns hold whole dialogues that differ in the last answer.

Bai et al. 2022, "Training a Helpful and Harmless Assistant with Reinforcement Learning from Human Feedback". Other
publishers give the same dialogues a column for the prompt; they are parsed by the same function, so that a prompt is
the same whichever data set it comes from.
"""

from __future__ import annotations

import re

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import MalformedRowError, Row, Source, compared, text, turns

_TURN = re.compile(r"\n\n(Human|Assistant):")


def dialogue(written: str) -> tuple[Message, ...]:
    """The turns of "\\n\\nHuman: ...\\n\\nAssistant: ..."; MalformedRowError where it does not start with one."""
    before, found = turns(written, _TURN)
    if before or not found:
        raise MalformedRowError("the dialogue does not start with a turn")
    return found


def parse(row: Row) -> Example:
    """Prompt: the turns both dialogues share; answers: the Assistant's last turn of each."""
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
