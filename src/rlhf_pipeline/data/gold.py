"""Gold scores: the true quality of any response, for prompts of sources that define it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rlhf_pipeline.data.records import Conversation, Message, Role
from rlhf_pipeline.data.sources import synthetic

GoldScore = Callable[[tuple[Message, ...], str], float]
"""Maps a prompt and a response to the response's quality; higher is better. Raises ValueError for a
prompt of another source."""

GOLD_SCORES: dict[str, GoldScore] = {"synthetic": synthetic.dialogue_gold_score}
"""Name of the source to its gold score."""


def gold_score(source: str, prompt: Conversation, response: str) -> float | None:
    """The gold score of a response without surrounding white space; None if `source` has none."""
    score = GOLD_SCORES.get(source)
    if score is None:
        return None
    messages = (Message(cast(Role, turn["role"]), turn["content"]) for turn in prompt)
    return score(tuple(messages), response.strip())
