"""What scores answers: rewards of a training, and judges of an evaluation beside the reward model
and the gold score. A field that no other kind has tells the kind of a block.
"""

import inspect
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import regex
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
)

from rlhf_pipeline.config.base_model import TEMPLATE_DATE, saved_config
from rlhf_pipeline.config.block import Block, Precision, operational
from rlhf_pipeline.config.doors import CODE, Door, parameters
from rlhf_pipeline.errors import ConfigError

INPUT_PREFIX = "rewards."
"""Prefix of the PPO job's inputs: `ppo.rewards.0` is the input `rewards.0`."""
REWARD_MODEL = "score"
"""The judge that is the reward model, and its scores."""
JUDGE_MODEL = "judge_model"
"""The judge that is the second reward model, its stage and its parameter block."""
GOLD = "gold"
"""The judge that knows the true quality."""
REWARD = Door("reward", {})
"""Functions that score responses: rewards, and judges."""
_SECRET = re.compile(
    r"(?!prompt_cache_key|(bos|eos|pad|unk)_token)"
    r"(\w*keys?|(\w*_)?(token|secret|password|auth|authorization|headers?))"
)
"""The name of a field with a secret."""


class RewardSource(Block):
    """Fields of every reward source."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of the centred score in the sum. 0: the source is reported without effect."""
    name: str | None = None
    """Name in the metric `reward/<name>`. None: "trained", the name of the function, folder or chat
    model, the kind of agreement, "regex" or "code". A function called score or gold, or like
    another source, is `my.score`: the name of its file, then its own."""


class TrainedReward(RewardSource):
    """The reward model trained by stage reward_model."""

    model: Literal["trained"] = "trained"
    """Tells the kind."""

    @property
    def label(self) -> str:
        return self.name or "trained"


class CallableReward(RewardSource):
    """A Python function `reward(prompts, responses)`; see `scoring.sources`."""

    callable: str
    """`path/to/file.py:function`, `package.module:function`, or the name of an installed one. The
    recipe contains the digest of this file, but not of its imports."""
    processes: NonNegativeInt = operational(0)
    """Processes of each rank that call the function with one response each. 0: the rank itself
    calls it with all of its responses."""
    timeout_s: PositiveFloat | None = operational(None)
    """Longest call for one response, in seconds, before the stage ends. It needs `processes`."""

    def _faults(self) -> Iterator[str]:
        if self.timeout_s is not None and not self.processes:
            yield (
                f"timeout_s: found {self.timeout_s:g}, which needs processes of its own. Fix: set "
                "processes to 1 or more"
            )

    @field_validator("callable")
    @classmethod
    def _has_function(cls, value: str) -> str:
        place = REWARD.names().get(value, value) if ":" not in value else value
        if not CODE.fullmatch(place):
            raise ValueError("expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
        return place

    @property
    def location(self) -> str:
        return self.callable.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.callable.rpartition(":")[2]

    @property
    def full_name(self) -> str:
        """The name of the file or module, and that of the function: `my.score`."""
        return f"{re.split('[/.]', self.location.removesuffix('.py'))[-1]}.{self.function}"

    @property
    def label(self) -> str:
        return self.name or self.function


class ModelReward(RewardSource):
    """Another reward model: a sequence classifier with one label and a linear head `score`."""

    path: str
    """Local folder; of a judge, also a name on the hub. The recipe contains the digest of its
    bytes, or the commit."""
    revision: str | None = None
    """Branch, tag or commit on the hub. None: the newest commit of the default branch."""
    retokenize: bool = False
    """Whether the model reads text in its own template and tokens, which need not be the
    policy's."""
    template_date: date = TEMPLATE_DATE
    """With `retokenize`: as in `base_model.template_date`, for its own chat template."""
    mean: float | None = Field(default=None, allow_inf_nan=False)
    """Mean that is subtracted from its scores. None: the `score_mean` in its config.json, or 0."""
    precision: Precision = "fp32"
    """Precision of weights and activations."""

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def on_hub(self) -> bool:
        """Whether a judge is a model on the hub: its name is like `owner/model`."""
        is_path = self.path.startswith((".", "/", "~")) or self.path.count("/") != 1
        return not is_path and not self.folder.is_dir()

    @property
    def label(self) -> str:
        return self.name or self.folder.resolve().name


Agreement = Literal["exact", "final_answer", "contains", "last_number", "math"]


class ReferenceReward(RewardSource):
    """1 for a response that agrees with the true answer of its prompt (`columns.reference`)."""

    reference: Agreement
    """What must agree, but for case, white space and a final full stop. exact: the answer;
    final_answer: the result after its last "answer is", "answer:", `####` or boxed in TeX;
    contains: the true answer in it; last_number: its last number; math: its value, by
    math-verify."""

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

    def _faults(self) -> Iterator[str]:
        for name in _texts(self.request):
            if any(map(_SECRET.fullmatch, name.lower().replace("-", "_").split("."))):
                yield (
                    f"request.{name}: found a field for a secret, expected none: parameters are "
                    "recorded. Fix: set openai.api_key_env to the name of an environment variable "
                    "with the key"
                )

    @field_validator("template")
    @classmethod
    def _has_fields(cls, value: str | None) -> str | None:
        fields = "{prompt}", "{first}", "{second}"
        if value is not None and any(field not in value for field in fields):
            raise ValueError(f"expected text with {', '.join(fields)}")
        return value


def _texts(request: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The places of the texts in a request, but for the fields that a JSON schema describes."""
    for name, value in request.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping) and name not in ("properties", "$defs"):
            yield from _texts(inner, f"{prefix}{name}.")
        elif isinstance(inner, str):
            yield f"{prefix}{name}"


class RubricReward(RewardSource):
    """A chat model that scores each answer alone, from 0 to 1."""

    rubric: str = Field(min_length=1)
    """What a good answer is, with {prompt}, {response} and {reference} (the true answer) for these
    texts. A text with {response} is the whole question, and must ask for a score like [[7]]."""
    openai: ChatConfig
    scale: PositiveFloat = 10.0
    """The best score, which divides the last [[number]] of a reply."""

    def _faults(self) -> Iterator[str]:
        if self.openai.template is not None:
            yield "openai.template: found a text, expected none: the rubric is the question"

    @property
    def label(self) -> str:
        return self.name or self.openai.model.rpartition("/")[2]


class CodeReward(RewardSource):
    """1 for a response whose program passes the tests in the true answer of its prompt, else 0."""

    code: Literal["python"]
    """Language of the program: the last fenced block of the response, or all of it. The true answer
    raises an error if the program is wrong, such as lines of `assert`."""
    timeout_s: PositiveFloat = 10.0
    """Longest run of a program with its tests, in seconds."""
    memory_mib: PositiveInt = Field(default=512, ge=64)
    """Largest address space of a program, and room for its files, in MiB."""
    processes: PositiveInt = operational(4)
    """Programs that each rank runs at the same time."""

    @property
    def label(self) -> str:
        return self.name or "code"


class EnvironmentReward(RewardSource):
    """The sum of the rewards that the environment of an episode has given."""

    environment: Literal["reward"]
    """Tells the kind."""

    @property
    def label(self) -> str:
        return self.name or "environment"


class PairwiseJudge(Block):
    """A chat model that compares two answers, in both orders."""

    weight: ClassVar[float] = 1.0

    openai: ChatConfig
    name: str | None = None
    """Name of the judge. None: the last part of the model's name."""

    @property
    def label(self) -> str:
        return self.name or self.openai.model.rpartition("/")[2]


_Single = (
    Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelReward, Tag("path")]
    | Annotated[ReferenceReward, Tag("reference")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[RubricReward, Tag("rubric")]
    | Annotated[CodeReward, Tag("code")]
    | Annotated[EnvironmentReward, Tag("environment")]
)
_Trained = Annotated[TrainedReward, Tag("model")]
_OfPairs = Annotated[PairwiseJudge, Tag("openai")]
Scorer = _Trained | _Single | _OfPairs
"""What scores an answer, or compares it with others. `Reward`, `SampleReward` and `Judge` are the
forms of it that a list of parameters accepts."""
_KINDS = "callable", "path", "reference", "regex", "rubric", "code", "environment"  # of both


def _told_by(*kinds: str, error: str, message: str) -> Discriminator:
    """The first of these fields that a block has tells its kind."""

    def kind(value: Any) -> str | None:
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        return next((kind for kind in kinds if kind in fields), None)

    return Discriminator(kind, custom_error_type=error, custom_error_message=message)


def _reward_form(value: Any) -> Any:
    if value == "trained":
        return {"model": value}
    is_function = isinstance(value, str) and (":" in value or value in REWARD.names())
    return {"callable": value} if is_function else value


def _judge_form(value: Any) -> Any:
    if isinstance(value, dict) and "model" in value:  # another name of `path`
        return {"path" if name == "model" else name: own for name, own in value.items()}
    return {"callable": value} if isinstance(value, str) else value


_REWARD_FORMS = (
    "expected 'trained', 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of "
    "model, callable, path, reference, regex, rubric, code and environment; beside openai, add a "
    "rubric: without one a chat model compares answers, and scores none"
)
_JUDGE_FORMS = (
    "expected 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of callable, "
    "path, reference, regex, rubric, code, environment and openai"
)
Reward = Annotated[
    _Trained | _Single,
    _told_by("model", *_KINDS, error="reward", message=_REWARD_FORMS),
    BeforeValidator(_reward_form),
]
SampleReward = Annotated[
    Scorer,
    _told_by("model", *_KINDS, "openai", error="reward", message=_REWARD_FORMS),
    BeforeValidator(_reward_form),
]
Judge = Annotated[
    _Single | _OfPairs,
    _told_by(*_KINDS, "openai", error="judge", message=_JUDGE_FORMS),
    BeforeValidator(_judge_form),
]


def _distinct(scorers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scorers with one label each: a function whose name is taken, by another one or by our own
    judges, also gets the name of its file. Raises ValueError if two labels are equal."""
    labels = [scorer.label for scorer in scorers]
    taken = {label for label in labels if labels.count(label) > 1}
    taken |= {REWARD_MODEL, JUDGE_MODEL, GOLD}
    renamed = tuple(
        scorer.model_copy(update={"name": scorer.full_name})
        if isinstance(scorer, CallableReward) and not scorer.name and scorer.label in taken
        else scorer
        for scorer in scorers
    )
    labels = [scorer.label for scorer in renamed]
    if same := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(
            f"found two called {same[0]!r}, expected unique names. Fix: set the name of one of them"
        )
    return renamed


def _check_rewards(rewards: tuple[Any, ...]) -> tuple[Any, ...]:
    if not rewards:
        raise ValueError(
            "found no reward source, expected at least one. "
            "Fix: add one, or remove rewards to use the trained reward model"
        )
    renamed = _distinct(rewards)
    for label in (reward.label for reward in renamed):
        if not re.fullmatch(r"[\w.-]+", label):
            raise ValueError(
                f"found label {label!r}, expected letters, digits, '.', '_' and '-'. "
                "Fix: set the source's name"
            )
    return renamed


def _check_judges(judges: tuple[Any, ...]) -> tuple[Any, ...]:
    renamed = _distinct(judges)
    for judge in renamed:
        if judge.weight != 1.0:
            raise ValueError(
                f"found weight {judge.weight} of judge {judge.label}, expected none, because "
                "judges are not summed. Fix: remove weight"
            )
    for fault in name_faults(renamed):
        raise ValueError(fault)
    return renamed


def name_faults(scorers: Sequence[Scorer]) -> Iterator[str]:
    """Labels that cannot stand beside our own judges among the scores of an answer."""
    for label in [each.label for each in scorers if not isinstance(each, TrainedReward)]:
        if not re.fullmatch(r"[\w.-]+(?<!_lower)(?<!_upper)", label):
            yield (
                f"found label {label!r}, expected letters, digits, '.', '_' and '-', and "
                "neither _lower nor _upper at the end. Fix: set name"
            )
        if label in (REWARD_MODEL, JUDGE_MODEL, GOLD):
            yield (
                f"found label {label!r}, expected another: {REWARD_MODEL} is that of the "
                f"reward model, {GOLD} that of the true quality. Fix: set another name"
            )


Rewards = Annotated[tuple[Reward, ...], AfterValidator(_check_rewards)]
SampleRewards = Annotated[tuple[SampleReward, ...], AfterValidator(_check_rewards)]
"""Rewards of PPO, and chat models that compare the answers to a prompt."""
Judges = Annotated[tuple[Judge, ...], AfterValidator(_check_judges)]


def reads_scored(reward: Scorer) -> bool:
    """Whether a reward is a function that may ask for the `Scored`, by its source."""
    if not isinstance(reward, CallableReward):
        return False
    asked = parameters(reward.callable)
    return not asked or "scored" in asked  # some sources do not tell


def uses_trained(rewards: Sequence[Scorer]) -> bool:
    """Whether the trained reward model is one of the sources."""
    return any(isinstance(reward, TrainedReward) for reward in rewards)


def trained_weight(rewards: Sequence[Scorer]) -> float:
    """The weight of the trained reward model in the score; 1 if it has no effect on the score."""
    weights = [reward.weight for reward in rewards if isinstance(reward, TrainedReward)]
    return sum(weights) or 1.0


def clip_of(reward: Scorer, score_clip: float | None) -> float:
    """The clip range of a source's centred scores, in which only reward models have one."""
    is_model = isinstance(reward, TrainedReward | ModelReward)
    return score_clip if is_model and score_clip else math.inf


def as_judges(rewards: Sequence[Scorer]) -> tuple[Scorer, ...]:
    """The rewards that a policy maximizes as judges, without the trained reward model."""
    judges: list[Scorer] = []
    for reward in rewards:
        if not isinstance(reward, TrainedReward) and reward.weight > 0:
            # A judge has no weight, and subtracts the mean that is stored with it.
            unset = {"weight": 1.0, "mean": None}
            own = {name: unset[name] for name in unset.keys() & type(reward).model_fields.keys()}
            judges.append(reward.model_copy(update=own))
    return tuple(judges)


def reads_references(source: Block) -> bool:
    """Whether a reward or a judge reads the true answers: of kind `reference` or `code`, a rubric
    with {reference}, or a function with a parameter `references`."""
    if isinstance(source, RubricReward):
        return "{reference}" in source.rubric
    if not isinstance(source, CallableReward):
        return isinstance(source, ReferenceReward | CodeReward)
    return "references" in parameters(source.callable)


def check_signature(
    reward: str, signature: inspect.Signature, sources: Mapping[str, Collection[str]]
) -> None:
    """Raise ConfigError if a reward function cannot be called as scoring calls it, or asks for a
    column that a source, by its place, does not carry.

    A column with a default is for all prompts or for none.
    """
    offered = {"references", "scored"}
    for name, parameter in list(signature.parameters.items())[2:]:
        without = [source for source, carried in sources.items() if name not in carried]
        some = 0 < len(without) < len(sources)
        is_asked = parameter.default is parameter.empty and name not in offered
        is_asked &= parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if without and (some or is_asked):
            raise ConfigError(
                f"{reward} asks for {name}, which {without[0]} does not carry. Fix: add "
                f"`extra: [{name}]` to the columns of {without[0]}"
                + ("" if some else f", or give {name} a default")
            )
        if sources and not without:
            offered.add(name)
    try:
        signature.bind([], [], **dict.fromkeys(offered & signature.parameters.keys()))
    except TypeError as error:
        raise ConfigError(
            f"{reward} cannot be called with (prompts, responses): {error}. "
            "Fix: define it as `def reward(prompts, responses)`; a further parameter "
            "`references` gets the reference answers, `scored` the tokens"
        ) from None


def check_model(reward: ModelReward) -> None:
    """Raise ConfigError if the folder of a reward model lacks what scoring reads."""
    if (config := saved_config(reward.folder)) is None:
        raise ConfigError(
            f"path {reward.folder.resolve()}: found no config.json, expected a folder with a model"
        )
    # transformers does not write two labels, its default.
    labels = len(config.get("id2label") or "  ")
    if labels != 1:
        raise ConfigError(f"{reward.path} is not a reward model: found {labels} labels, expected 1")
    file, whose = "token_contract.json", "policy"
    fix = "set retokenize to true to pass texts in the model's own chat template"
    if reward.retokenize:
        file, whose, fix = "tokenizer_config.json", "model", "save the tokenizer in the same folder"
    if not (reward.folder / file).is_file():
        raise ConfigError(
            f"{reward.path}: found no {file}, expected the {whose}'s tokenizer. Fix: {fix}"
        )
