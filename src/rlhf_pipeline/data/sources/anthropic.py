"""Anthropic's helpful and harmless comparisons: both columns hold whole dialogues that differ in the last answer.

Bai et al. 2022, "Training a Helpful and Harmless Assistant with Reinforcement Learning from Human Feedback".
"""

from __future__ import annotations

import re

from rlhf_pipeline.data.records import Message, Role
from rlhf_pipeline.data.sources.source import Answers, MalformedRowError, Row, Source, reader, text

_NAME = "Anthropic/hh-rlhf"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}


def parse(row: Row) -> Answers:
    """Prompt: the turns both dialogues share; answers: the Assistant's last turn of each, stripped."""
    chosen, rejected = _dialogue(text(row, "chosen")), _dialogue(text(row, "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise MalformedRowError("the dialogues differ before the last answer")
    return Answers(chosen[:-1], chosen[-1].content, rejected[-1].content)


def _dialogue(dialogue: str) -> tuple[Message, ...]:
    before, *parts = _TURN.split(dialogue)
    if before.strip() or not parts:
        raise MalformedRowError("the dialogue does not start with a turn")
    turns = tuple(Message(_ROLES[name], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True))
    if turns[-1].role != "assistant":
        raise MalformedRowError("the dialogue does not end with the Assistant")
    return turns


SOURCE = Source(_NAME, reader(_NAME, parse), "Anthropic's helpful and harmless dialogues, about 161,000 comparisons")
