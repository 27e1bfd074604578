"""Answers as text, and what scores them for rewards and judges alike, loaded by `load_source`.

No module that reads text alone imports torch: its import takes seconds. To add a kind of source,
write a class like `CodeSource`, its block and its place in `Scorer` in `config/rewards.py`, and a
case in `load_source`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rlhf_pipeline.config.rewards import (
    CallableReward,
    CodeReward,
    EnvironmentReward,
    ModelReward,
    ReferenceReward,
    RegexReward,
    RubricReward,
    Scorer,
)
from rlhf_pipeline.data.record_files import further_columns
from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.job import LaunchedJob

if TYPE_CHECKING:
    from rlhf_pipeline.episodes.partner import Episode
    from rlhf_pipeline.generation.records import Scored


@dataclass(frozen=True)
class Answered:
    """Prompts and responses as text; lists of B."""

    prompts: list[Conversation]
    references: list[str | None]  # true answers, where they are known
    responses: list[str]  # without special tokens and surrounding white space
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns of the sources, see `ColumnMap.extra`; of episodes, also `episode`, their
    records."""

    @classmethod
    def of(
        cls,
        rows: Mapping[str, list[Any]],
        responses: list[str],
        episodes: Sequence["Episode"] | None = None,
    ) -> Self:
        """The responses to rows of the prepared files, or the last turns of episodes."""
        columns, prompts = further_columns(rows), rows["messages"]
        if episodes is not None:
            prompts = [episode.prompt for episode in episodes]
            columns["episode"] = [episode.record() for episode in episodes]
        return cls(prompts, rows["reference"], [text.strip() for text in responses], columns)

    def true_answers(self, place: str) -> list[str]:
        """The true answers; StageError, which names `place`, if one is missing: right responses
        would count as wrong ones."""
        known = [each for each in self.references if each is not None]
        if missing := len(self.references) - len(known):
            raise StageError(
                f"{place}: found {missing} of {len(self.references)} prompts without a true "
                "answer, expected one for each. Fix: set split.without_reference to drop"
            )
        return known


Source = Callable[["Scored", Answered], list[float]]
"""What a reward or a judge is, loaded: it scores the responses of a rollout, (B,); a model's scores
are centred. Only models, and functions that ask for it, read the `Scored`. One that scores texts
elsewhere says so by `apart` ("server" or "processes"), and may start before the models. One that
counts what it could not score has a method `counted`, which returns the numbers since its last call
by name."""


def load_source(
    scorer: Scorer, place: str, name: str, job: LaunchedJob, reading: Any = None
) -> Source | None:
    """Load what scores single answers; None for the trained reward model and a judge of pairs.

    `place` is its parameter, and `name` the input with its content. A reward model needs a
    `Reading`. Each case imports what it needs, and the default needs nothing. Raises StageError if
    a function cannot be imported, or the machine has no sandbox, ConfigError if a function does not
    take prompts and responses, and ArtifactError if the content has changed since the stage was
    planned, or a folder contains no reward model, or one of another tokenizer.
    """
    match scorer:
        case CallableReward():
            from rlhf_pipeline.scoring.sources import FunctionSource, import_function

            return FunctionSource.load(scorer, import_function(scorer, job, name), job, name)
        case ReferenceReward():
            from rlhf_pipeline.scoring.sources import FunctionSource
            from rlhf_pipeline.scoring.true_answers import agreement

            return FunctionSource(scorer.reference, agreement(scorer.reference))
        case RegexReward():
            from rlhf_pipeline.scoring.sources import matches

            return matches(scorer.regex)
        case RubricReward():
            from rlhf_pipeline.scoring.chat_model import ChatModel, RubricSource, reply_folder

            return RubricSource(scorer, ChatModel(scorer.openai, reply_folder(job), place))
        case CodeReward():
            from rlhf_pipeline.scoring.sources import CodeSource

            return CodeSource(scorer, place)
        case EnvironmentReward():
            return lambda _, answered: [each["reward"] for each in answered.columns["episode"]]
        case ModelReward():
            from rlhf_pipeline.scoring.reward_sources import ModelSource

            return ModelSource.load(scorer, place, name, job, reading)
    return None
