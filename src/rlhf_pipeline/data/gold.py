"""Sources that know the true quality of any answer, and how they tell it."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_pipeline.data.records import Conversation, Message
from rlhf_pipeline.data.sources import synthetic

Judge = Callable[[tuple[Message, ...], str], float]
"""Prompt and response to the response's quality; higher is better. ValueError for a prompt of another source."""

JUDGES: dict[str, Judge] = {"synthetic": synthetic.judge}
"""Source to judge."""


def judged(source: str, prompt: Conversation, response: str) -> float | None:
    """The gold score of a response, white space around it aside; None where the prompt's source has no judge."""
    judge = JUDGES.get(source)
    return (
        None
        if judge is None
        else judge(tuple(Message(**message) for message in prompt), response.strip())
    )  # type: ignore[arg-type]
