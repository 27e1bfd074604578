"""Gold scores: the true quality of any response, for prompts of sources that define it."""

from collections.abc import Callable

from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.data.sources import synthetic

GOLD_SCORES: dict[str, Callable[[Conversation, str], float]] = {
    "synthetic": lambda prompt, response: synthetic.gold_score(prompt[-1]["content"], response)
}
"""Name of the source to a function from prompt and response to the response's quality; higher is
better. It raises ValueError for a prompt of another source."""


def gold_score(source: str, prompt: Conversation, response: str) -> float | None:
    """The gold score of a response without surrounding white space; None if `source` has none."""
    score = GOLD_SCORES.get(source)
    return None if score is None else score(prompt, response.strip())
