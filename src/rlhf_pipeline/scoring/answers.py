"""Answers as text, which functions, chat models, programs and true answers score.

No module that reads text alone imports torch: its import takes seconds.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rlhf_pipeline.data.records import Conversation
from rlhf_pipeline.errors import StageError

if TYPE_CHECKING:
    from rlhf_pipeline.generation.records import Scored


@dataclass(frozen=True)
class Answered:
    """Prompts and responses as text; lists of B."""

    prompts: list[Conversation]
    references: list[str | None]  # true answers, where they are known
    responses: list[str]  # without special tokens and surrounding white space
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns of the sources, see `ColumnMap.extra`."""

    @classmethod
    def of(cls, rows: Mapping[str, list[Any]], responses: list[str]) -> Self:
        """The responses to rows of the prepared files."""
        extra = [json.loads(text or "{}") for text in rows.get("extra", ())]
        names = dict.fromkeys(name for row in extra for name in row)
        columns = {name: [row.get(name) for row in extra] for name in names}
        texts = [text.strip() for text in responses]
        return cls(rows["messages"], rows["reference"], texts, columns)

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
are centred. Only models, and functions that ask for it, read the `Scored`."""
