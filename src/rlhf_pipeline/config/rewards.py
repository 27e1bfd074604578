"""Sources of PPO's score; judges of an evaluation beside the reward model and the gold score."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import regex
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
)

from rlhf_pipeline.config.base_model import TEMPLATE_DATE
from rlhf_pipeline.config.block import Block, Precision, operational
from rlhf_pipeline.config.doors import Door

INPUT_PREFIX = "rewards."
"""Prefix of the PPO job's inputs: `ppo.rewards.0` is the input `rewards.0`."""

REWARD = Door("reward", {})
"""Functions that score responses: rewards, and judges."""
_CALLABLE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_NAME = re.compile(r"[\w.-]+")
_REWARD_FORMS = (
    "expected 'trained', 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of "
    "model, callable, path, reference, regex and rubric; beside openai, add a rubric: without one "
    "a chat model compares answers, and scores none"
)


class RewardSource(Block):
    """Fields of every reward source."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the centred score in the sum. 0: the source is reported without effect."""
    name: str | None = None
    """Name in the metric `reward/<name>`. None: "trained", the name of the function, folder or chat
    model, the kind of agreement with the true answer, or "regex"."""


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
    """`path/to/file.py:function`, `package.module:function`, or the name of an installed one. The
    recipe contains the digest of this file, but not of its imports."""

    @field_validator("callable")
    @classmethod
    def _has_function(cls, value: str) -> str:
        place = REWARD.names().get(value, value) if ":" not in value else value
        if not _CALLABLE.fullmatch(place):
            raise ValueError("expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
        return place

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


Agreement = Literal["exact", "final_answer", "contains", "last_number", "math"]


class ReferenceReward(RewardSource):
    """1 for a response that agrees with the true answer of its prompt, else 0.

    The true answers are the column `columns.reference` of a source.
    """

    reference: Agreement
    """What counts as right, without regard to case, white space and a final full stop. exact: the
    answer is the true answer; final_answer: the result that it names after its last "answer is",
    "answer:", `####` or boxed in TeX is that of the true answer; contains: it contains it;
    last_number: its last number is that of the true answer; math: both are equal as mathematics, by
    the library math-verify."""

    @property
    def label(self) -> str:
        return self.name or self.reference


class RegexReward(RewardSource):
    """1 for a response in which a regular expression is found, else 0."""

    regex: str
    """The pattern, in the syntax of Python's `re`."""

    def _faults(self) -> Iterator[str]:
        try:
            regex.compile(self.regex)
        except regex.error as error:
            yield f"found {self.regex!r}, expected a regular expression: {error}"

    @property
    def label(self) -> str:
        return self.name or "regex"


class ChatConfig(Block):
    """A chat model behind an OpenAI-compatible server, and what it is asked."""

    base_url: str = Field(pattern=r"^https?://[^@?\s]+$")
    """Address of the server, for example http://localhost:8000/v1, without user and query."""
    model: str
    """Name of the model on that server."""
    api_key_env: str | None = operational(None)
    """Environment variable with the key. None: the server needs none."""
    template: str | None = None
    """The question, with {prompt}, {first} and {second}. The model answers with [[A]] if the first
    answer is better, [[B]] if the second one is, and [[C]] for a tie."""
    request: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Further fields of every request, such as max_tokens."""
    concurrency: PositiveInt = operational(8)
    """Requests at the same time."""

    @field_validator("template")
    @classmethod
    def _has_fields(cls, value: str | None) -> str | None:
        fields = "{prompt}", "{first}", "{second}"
        if value is not None and any(field not in value for field in fields):
            raise ValueError(f"expected text with {', '.join(fields)}")
        return value


class RubricReward(RewardSource):
    """A chat model that scores each answer alone, from 0 to 1."""

    rubric: str = Field(min_length=1)
    """What a good answer is. {prompt}, {response} and {reference}, the true answer, stand for these
    texts; a text with {response} is the whole question, and must ask for a score like [[7]]."""
    openai: ChatConfig
    """The chat model."""
    scale: PositiveFloat = 10.0
    """The best score. A reply counts by its last [[number]], divided by this value."""

    def _faults(self) -> Iterator[str]:
        if self.openai.template is not None:
            yield "openai.template: found a text, expected none: the rubric is the question"

    @property
    def label(self) -> str:
        return self.name or self.openai.model.rpartition("/")[2]


def _short_form(value: Any) -> Any:
    if value == "trained":
        return {"model": value}
    is_function = isinstance(value, str) and (":" in value or value in REWARD.names())
    return {"callable": value} if is_function else value


def _kind(*kinds: str) -> Callable[[Any], str | None]:
    """Tells alternatives apart by the field that only one of them has."""

    def kind(value: Any) -> str | None:
        given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        return next((kind for kind in kinds if kind in given), None)

    return kind


Reward = Annotated[
    Annotated[TrainedReward, Tag("model")]
    | Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelReward, Tag("path")]
    | Annotated[ReferenceReward, Tag("reference")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[RubricReward, Tag("rubric")],
    Discriminator(
        _kind("model", "callable", "path", "reference", "regex", "rubric"),
        custom_error_type="reward",
        custom_error_message=_REWARD_FORMS,
    ),
    BeforeValidator(_short_form),
]


def _check_labels(rewards: tuple[Any, ...]) -> tuple[Any, ...]:
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


def uses_trained(rewards: Sequence[Block]) -> bool:
    """Whether the trained reward model is one of the sources."""
    return any(isinstance(reward, TrainedReward) for reward in rewards)


def trained_weight(rewards: Sequence[RewardSource]) -> float:
    """The weight of the trained reward model in the score; 1 if it has no effect on the score."""
    weights = [reward.weight for reward in rewards if isinstance(reward, TrainedReward)]
    return sum(weights) or 1.0


def clip_of(reward: RewardSource, score_clip: float | None) -> float:
    """The clip range of a source's centred scores, in which only reward models have one."""
    is_model = isinstance(reward, TrainedReward | ModelReward)
    return score_clip if is_model and score_clip else math.inf


_JUDGE_FORMS = (
    "expected 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of callable, "
    "model, reference, regex, rubric and openai"
)


class ModelJudge(Block):
    """Another reward model: a sequence classifier with one label and a linear head `score`."""

    model: str = Field(min_length=1)
    """Local folder, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub. None: the newest commit of the default branch."""
    name: str | None = None
    """Name of the judge. None: the last part of `model`."""
    retokenize: bool = False
    """Whether the model reads text in its own chat template and tokens; required unless it has the
    tokens of the policies."""
    template_date: date = TEMPLATE_DATE
    """With `retokenize`: as in `ModelReward`."""
    precision: Precision = "fp32"
    """Precision of weights and activations."""

    @property
    def label(self) -> str:
        """Name in metrics, win rates and reports."""
        return self.name or Path(self.model).expanduser().resolve().name

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a model on the hub, whose name is like `owner/model`."""
        is_path = self.model.startswith((".", "/", "~")) or self.model.count("/") != 1
        folder = Path(self.model).expanduser()
        return folder if is_path or folder.is_dir() else None

    def as_reward(self, folder: Path) -> ModelReward:
        """The same model as a source of rewards."""
        own = self.model_dump(include={"name", "retokenize", "template_date", "precision"})
        return ModelReward(path=str(folder), **own)


class PairwiseJudge(Block):
    """A chat model that compares two answers, in both orders."""

    weight: ClassVar[float] = 1.0

    openai: ChatConfig
    name: str | None = None
    """Name of the judge. None: the last part of the model's name."""

    @property
    def label(self) -> str:
        return self.name or self.openai.model.rpartition("/")[2]


Judge = Annotated[
    Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelJudge, Tag("model")]
    | Annotated[ReferenceReward, Tag("reference")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[RubricReward, Tag("rubric")]
    | Annotated[PairwiseJudge, Tag("openai")],
    Discriminator(
        _kind("callable", "model", "reference", "regex", "rubric", "openai"),
        custom_error_type="judge",
        custom_error_message=_JUDGE_FORMS,
    ),
    BeforeValidator(lambda judge: {"callable": judge} if isinstance(judge, str) else judge),
]


SampleReward = Annotated[
    Annotated[Reward, Tag("reward")] | Annotated[PairwiseJudge, Tag("openai")],
    Discriminator(
        lambda value: "openai" if _kind("rubric", "openai")(value) == "openai" else "reward"
    ),
]
SampleRewards = Annotated[tuple[SampleReward, ...], AfterValidator(_check_labels)]
"""Rewards of PPO, and chat models that compare the answers to a prompt."""


def as_judges(rewards: Sequence[SampleReward], *, penalties: bool = False) -> tuple[Judge, ...]:
    """The rewards that a policy maximizes as judges, without the trained reward model; with
    `penalties`, also those without a positive weight."""
    found: list[Judge] = []
    for reward in rewards:
        if reward.weight <= 0 and not penalties:
            continue
        if isinstance(reward, ModelReward):
            own = reward.model_dump(include={"retokenize", "template_date", "precision"})
            found.append(ModelJudge(model=reward.path, name=reward.label, **own))
        elif isinstance(reward, PairwiseJudge):
            found.append(reward)
        elif not isinstance(reward, TrainedReward):
            found.append(reward.model_copy(update={"weight": 1.0}))
    return tuple(found)


def local_source(judge: Judge) -> Block:
    """A reward model in a local folder as a source of rewards; other judges as they are."""
    if isinstance(judge, ModelJudge) and judge.folder is not None:
        return judge.as_reward(judge.folder)
    return judge
