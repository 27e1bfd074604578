"""Dialogues of ShareGPT, Alpaca and Open Assistant in Vicuna's format.

`prompt` is "USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:", `label` the answer, which may end
with "</s>". The data set has no documentation. By Vicuna's format, white space or "</s>" separates
turns, and text before the first turn is a system message.
"""

from __future__ import annotations

import re

from rlhf_pipeline.data.records import Example, Message
from rlhf_pipeline.data.sources.adapter import MalformedRowError, Row, Source, text, turns

_TURN = re.compile(r"(?:^|\s|</s>)(USER|ASSISTANT):")


def parse(row: Row) -> Example:
    """Prompt: the turns before the last "ASSISTANT:". Answer: the label."""
    system, found = turns(text(row, "prompt"), _TURN)
    if not found or found[-1] != Message("assistant", ""):
        raise MalformedRowError("the prompt does not end with 'ASSISTANT:'")
    prompt = tuple(Message(message.role, _without_end(message.content)) for message in found[:-1])
    if system:
        prompt = (Message("system", system), *prompt)
    return Example(prompt, _without_end(text(row, "label")))


def _without_end(content: str) -> str:
    return content.strip().removesuffix("</s>").strip()


SOURCES = (
    Source(
        name="pvduy/sharegpt_alpaca_oa_vicuna_format",
        kind="demonstrations",
        description="English dialogues of ShareGPT, Alpaca and Open Assistant",
        columns=("prompt", "label"),
        parse=parse,
    ),
)
