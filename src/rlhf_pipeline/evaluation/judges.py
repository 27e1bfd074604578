"""The judges: each one scores the answers of every policy.

To add a judge: a class with `name` and `score`, and one line in `load_judges`. Metrics, win rates
and reports follow from the judge's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rlhf_pipeline.config.evaluate import GOLD, JUDGE_PREFIX, REWARD_MODEL, EvaluateConfig
from rlhf_pipeline.data.gold import gold_score
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import sequence_scores
from rlhf_pipeline.models.scalar_head import TokenScores
from rlhf_pipeline.rollout.function_reward import Answered, FunctionSource, import_function
from rlhf_pipeline.rollout.scoring import Scored, by_micro_batches
from rlhf_pipeline.runtime.job import LaunchedJob


@dataclass(frozen=True)
class AnswerBatch:
    """What a judge gets: the answers of one policy to the prompts of this rank, B rows."""

    scored: Scored
    """Prompts and answers as tokens, with the log-probabilities of the policy and of SFT."""
    text: Answered
    """Prompts as messages, answers as texts, and the true answers where known."""
    sources: list[str]
    """Name of each prompt's source."""


class Judge(Protocol):
    """Scores answers; higher is better."""

    @property
    def name(self) -> str:
        """Name in metrics, win rates and reports."""

    def score(self, answers: AnswerBatch) -> Sequence[float | None]:
        """Score each answer; None for a prompt that this judge cannot judge."""


@dataclass(frozen=True)
class RewardModelJudge:
    """The reward model's score minus the mean score of demonstrations."""

    model: TokenScores | DeepSpeedEngine
    micro_batch_tokens: int
    world: World
    name: str = REWARD_MODEL

    @torch.no_grad()
    def score(self, answers: AnswerBatch) -> list[float]:
        """Score each answer at its last token."""
        sequences = answers.scored.sequences
        scores = by_micro_batches(
            sequence_scores, self.model, sequences, self.micro_batch_tokens, self.world
        )
        return [score - self.model.score_mean for score in scores.tolist()]


@dataclass(frozen=True)
class GoldJudge:
    """The true quality. No model was trained on these scores directly."""

    name: str = GOLD

    def score(self, answers: AnswerBatch) -> list[float | None]:
        """Score each answer; None if the prompt's source has no gold score."""
        rows = zip(answers.sources, answers.text.prompts, answers.text.responses, strict=True)
        return [gold_score(*row) for row in rows]


@dataclass(frozen=True)
class FunctionJudge:
    """A Python function of the user."""

    name: str
    function: FunctionSource

    def score(self, answers: AnswerBatch) -> list[float]:
        """Call the function with all answers together."""
        return list(self.function(answers.scored, answers.text).tolist())


def load_judges(job: LaunchedJob, config: EvaluateConfig) -> list[Judge]:
    """Load the judges other than the reward model.

    Raises StageError if a function cannot be imported, or does not take prompts and responses.
    """
    judges: list[Judge] = [GoldJudge()]
    for index, judge in enumerate(config.judges):
        function = import_function(judge, job.inputs[f"{JUDGE_PREFIX}{index}"])
        judges.append(FunctionJudge(judge.label, FunctionSource(judge.callable, function)))
    return judges
