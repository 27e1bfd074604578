"""The record of one answer, as `answers.jsonl` stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.config.evaluate import REWARD_MODEL

BASELINE = "sft"


@dataclass(frozen=True)
class Answer:
    """The answer of one policy to one prompt."""

    row: int
    prompt: str
    response: str
    scores: dict[str, float | None]
    """Score by judge; None if the judge has no score for this prompt."""
    kl: float
    """log pi(response) - log pi_sft(response), nats."""
    response_tokens: int
    ended: bool

    def record(self) -> dict[str, Any]:
        """The answer as JSON types; each score is a field."""
        return {
            "row": self.row,
            "prompt": self.prompt,
            "response": self.response,
            **{score_name(judge): score for judge, score in self.scores.items()},
            "kl": self.kl,
            "response_tokens": self.response_tokens,
            "ended": self.ended,
        }


def score_name(judge: str) -> str:
    """Name of a judge's scores in metrics and records: `score`, `gold_score`, `<judge>_score`."""
    return judge if judge == REWARD_MODEL else f"{judge}_score"
