"""Where PPO's score comes from: the trained reward model, a function of your own, another reward model, or a sum of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.training import Precision

INPUT_PREFIX = "rewards."
"""Inputs of the PPO job: the source of `ppo.rewards.0` is the input `rewards.0`."""

_CALLABLE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_NAME = re.compile(r"[\w.-]+")
_FORMS = (
    "is no source of rewards: write 'trained', 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of "
    "model, callable and path"
)


class RewardSource(Block):
    """What every source of rewards has."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the centred score in the sum. 0: the source is measured and has no effect."""

    name: str | None = None
    """What the metric `reward/<name>` calls it. None: "trained", the function's name, or the folder's."""


class TrainedReward(RewardSource):
    """The reward model that stage reward_model trained."""

    model: Literal["trained"] = "trained"

    @property
    def label(self) -> str:
        """Name in metrics and errors."""
        return self.name or "trained"


class CallableReward(RewardSource):
    """A Python function `reward(prompts, responses)`, see `rlhf_pipeline.rollout.reward_sources`."""

    callable: str
    """`path/to/file.py:function`, or `package.module:function`. The source of the one file counts for the cache, what it
    imports does not."""

    @field_validator("callable")
    @classmethod
    def _place(cls, value: str) -> str:
        if not _CALLABLE.fullmatch(value):
            raise ValueError("must be FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
        return value

    @property
    def place(self) -> str:
        """The file or the module."""
        return self.callable.rpartition(":")[0]

    @property
    def function(self) -> str:
        """The function's name."""
        return self.callable.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Name in metrics and errors."""
        return self.name or self.function


class ModelReward(RewardSource):
    """A reward model from elsewhere: a sequence classifier with one label whose head `score` reads the last token."""

    path: str
    """Local folder. Its bytes count for the cache."""

    retokenize: bool = False
    """True: prompt and response are given to it as text, in its own chat template and tokens. Needed where its tokens are not
    the policy's."""

    mean: float | None = Field(default=None, allow_inf_nan=False)
    """What its scores are centred by. None: the mean stored with it, or 0 where there is none."""

    precision: Precision = "fp32"
    """Precision of the weights and activations."""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return Path(self.path).expanduser()

    @property
    def label(self) -> str:
        """Name in metrics and errors."""
        return self.name or self.folder.resolve().name


def _short_form(value: Any) -> Any:
    """The one-line forms as blocks."""
    if not isinstance(value, str):
        return value
    return (
        {"model": value} if value == "trained" else {"callable": value} if ":" in value else value
    )


def _kind(value: Any) -> str | None:
    given = (
        value if isinstance(value, dict) else vars(value) if isinstance(value, RewardSource) else {}
    )
    return next((key for key in ("model", "callable", "path") if key in given), None)


Reward = Annotated[
    Annotated[TrainedReward, Tag("model")]
    | Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelReward, Tag("path")],
    Discriminator(_kind, custom_error_type="reward", custom_error_message=_FORMS),
    BeforeValidator(_short_form),
]


def _sound(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    labels = [reward.label for reward in rewards]
    if not labels:
        raise ValueError(
            "no source of rewards; name one, or leave rewards out for the trained reward model"
        )
    for label in labels:
        if not _NAME.fullmatch(label):
            raise ValueError(
                f"{label!r} cannot name a metric; give the source a name of letters, digits, '.', '_', '-'"
            )
        if labels.count(label) > 1:
            raise ValueError(f"two sources are called {label!r}; give one of them another name")
    return rewards


Rewards = Annotated[tuple[Reward, ...], AfterValidator(_sound)]


def uses_trained(rewards: Sequence[RewardSource]) -> bool:
    """Whether the trained reward model is one of the judges."""
    return any(isinstance(reward, TrainedReward) for reward in rewards)
