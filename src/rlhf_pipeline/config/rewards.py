"""Sources of PPO's score: the trained reward model, Python functions, and other reward models."""

import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator

from rlhf_pipeline.config.base_model import TEMPLATE_DATE
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.precision import Precision

INPUT_PREFIX = "rewards."
"""Prefix of the PPO job's inputs: `ppo.rewards.0` is the input `rewards.0`."""

_CALLABLE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_NAME = re.compile(r"[\w.-]+")
_FORMS = (
    "expected 'trained', 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of "
    "model, callable and path"
)


class RewardSource(Block):
    """Fields of every reward source."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the centred score in the sum. 0: the source is reported without effect."""
    name: str | None = None
    """Name in the metric `reward/<name>`. None: "trained", or the name of the function or
    folder."""


class TrainedReward(RewardSource):
    """The reward model trained by stage reward_model."""

    model: Literal["trained"] = "trained"

    @property
    def label(self) -> str:
        """Name in metrics and errors."""
        return self.name or "trained"


class CallableReward(RewardSource):
    """A Python function `reward(prompts, responses)`; see `rollout.function_reward`."""

    callable: str
    """`path/to/file.py:function` or `package.module:function`. The recipe contains the digest of
    this file, but not of its imports."""

    @field_validator("callable")
    @classmethod
    def _has_function(cls, value: str) -> str:
        if not _CALLABLE.fullmatch(value):
            raise ValueError("expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
        return value

    @property
    def location(self) -> str:
        return self.callable.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.callable.rpartition(":")[2]

    @property
    def label(self) -> str:
        return self.name or self.function


class ModelReward(RewardSource):
    """Another reward model: a sequence classifier with one label and a linear head `score`."""

    path: str
    """Local folder. The recipe contains the digest of its bytes."""
    retokenize: bool = False
    """Whether to pass prompt and response as text, in the model's own chat template and tokens.
    Required if its tokenizer differs from the policy's."""
    template_date: date = TEMPLATE_DATE
    """With `retokenize`: the date that its chat template renders in place of today's, like
    `base_model.template_date`."""
    mean: float | None = Field(default=None, allow_inf_nan=False)
    """Mean that is subtracted from its scores. None: the `score_mean` in its config.json, or 0."""
    precision: Precision = "fp32"
    """Precision of weights and activations."""

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def label(self) -> str:
        return self.name or self.folder.resolve().name


def _short_form(value: Any) -> Any:
    if value == "trained":
        return {"model": value}
    return {"callable": value} if isinstance(value, str) and ":" in value else value


def _kind(value: Any) -> str | None:
    given = vars(value) if isinstance(value, RewardSource) else value
    if not isinstance(given, dict):
        return None
    return next((key for key in ("model", "callable", "path") if key in given), None)


Reward = Annotated[
    Annotated[TrainedReward, Tag("model")]
    | Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelReward, Tag("path")],
    Discriminator(_kind, custom_error_type="reward", custom_error_message=_FORMS),
    BeforeValidator(_short_form),
]


def _check_labels(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    labels = [reward.label for reward in rewards]
    if not labels:
        raise ValueError(
            "found no reward source, expected at least one. "
            "Fix: add one, or remove rewards to use the trained reward model"
        )
    for label in labels:
        if not _NAME.fullmatch(label):
            raise ValueError(
                f"found label {label!r}, expected letters, digits, '.', '_' and '-'. "
                "Fix: set the source's name"
            )
        if labels.count(label) > 1:
            raise ValueError(
                f"found two sources called {label!r}, expected unique names. Fix: set name"
            )
    return rewards


Rewards = Annotated[tuple[Reward, ...], AfterValidator(_check_labels)]


def uses_trained(rewards: Sequence[RewardSource]) -> bool:
    """Whether the trained reward model is one of the sources."""
    return any(isinstance(reward, TrainedReward) for reward in rewards)


def trained_weight(rewards: Sequence[RewardSource]) -> float:
    """The weight of the trained reward model in the score; 1 if it has no effect on the score."""
    weights = [reward.weight for reward in rewards if isinstance(reward, TrainedReward)]
    return sum(weights) or 1.0
