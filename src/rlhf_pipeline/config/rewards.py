"""Sources of PPO's score; judges of an evaluation beside the reward model and the gold score."""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from rlhf_pipeline.config.base_model import saved_config
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import parameters
from rlhf_pipeline.config.reward_blocks import (
    REWARD,
    CallableReward,
    ChatConfig,
    CodeReward,
    ModelReward,
    ReferenceReward,
    RegexReward,
    RewardSource,
    RubricReward,
    TrainedReward,
)
from rlhf_pipeline.errors import ConfigError

INPUT_PREFIX = "rewards."
"""Prefix of the PPO job's inputs: `ppo.rewards.0` is the input `rewards.0`."""

REWARD_MODEL = "score"
"""The judge that is the reward model, and its scores."""
JUDGE_MODEL = "judge_model"
"""The judge that is the second reward model, its stage and its parameter block."""
GOLD = "gold"
"""The judge that knows the true quality."""
_NAME = re.compile(r"[\w.-]+")
_REWARD_FORMS = (
    "expected 'trained', 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of "
    "model, callable, path, reference, regex, rubric and code; beside openai, add a rubric: "
    "without one a chat model compares answers, and scores none"
)


def _short_form(value: Any) -> Any:
    if value == "trained":
        return {"model": value}
    is_function = isinstance(value, str) and (":" in value or value in REWARD.names())
    return {"callable": value} if is_function else value


_SCORERS = ("callable", "path", "reference", "regex", "rubric", "code")
"""The fields that tell the kinds of `_Scorer`, which are rewards and judges."""
_Scorer = (
    Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelReward, Tag("path")]
    | Annotated[ReferenceReward, Tag("reference")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[RubricReward, Tag("rubric")]
    | Annotated[CodeReward, Tag("code")]
)


def _kind(*kinds: str) -> Callable[[Any], str | None]:
    def kind(value: Any) -> str | None:
        given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        return next((kind for kind in kinds if kind in given), None)

    return kind


Reward = Annotated[
    Annotated[TrainedReward, Tag("model")] | _Scorer,
    Discriminator(
        _kind("model", *_SCORERS),
        custom_error_type="reward",
        custom_error_message=_REWARD_FORMS,
    ),
    BeforeValidator(_short_form),
]


def distinct(sources: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rewards or judges with one label each: a function whose name is taken, by another one or by
    our own judges, also gets the name of its file. Raises ValueError if two labels are equal."""
    labels = [source.label for source in sources]
    taken = {label for label in labels if labels.count(label) > 1}
    taken |= {REWARD_MODEL, JUDGE_MODEL, GOLD}
    found = tuple(
        source.model_copy(update={"name": source.full_name})
        if isinstance(source, CallableReward) and not source.name and source.label in taken
        else source
        for source in sources
    )
    labels = [source.label for source in found]
    if same := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(
            f"found two called {same[0]!r}, expected unique names. Fix: set the name of one of them"
        )
    return found


def _check_labels(rewards: tuple[Any, ...]) -> tuple[Any, ...]:
    if not rewards:
        raise ValueError(
            "found no reward source, expected at least one. "
            "Fix: add one, or remove rewards to use the trained reward model"
        )
    found = distinct(rewards)
    for label in (reward.label for reward in found):
        if not _NAME.fullmatch(label):
            raise ValueError(
                f"found label {label!r}, expected letters, digits, '.', '_' and '-'. "
                "Fix: set the source's name"
            )
    return found


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
    "path, reference, regex, rubric, code and openai"
)


def _judge_form(value: Any) -> Any:
    if isinstance(value, dict) and "model" in value:  # another name of `path`
        return {"path" if name == "model" else name: own for name, own in value.items()}
    return {"callable": value} if isinstance(value, str) else value


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
    _Scorer | Annotated[PairwiseJudge, Tag("openai")],
    Discriminator(
        _kind(*_SCORERS, "openai"),
        custom_error_type="judge",
        custom_error_message=_JUDGE_FORMS,
    ),
    BeforeValidator(_judge_form),
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
        if isinstance(reward, PairwiseJudge):
            found.append(reward)
        elif not isinstance(reward, TrainedReward) and (reward.weight > 0 or penalties):
            own = {"mean": None} if isinstance(reward, ModelReward) else {}
            found.append(reward.model_copy(update={"weight": 1.0, **own}))
    return tuple(found)


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
    if reward.retokenize and not (reward.folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{reward.path}: found no tokenizer_config.json, expected the model's tokenizer. "
            "Fix: save the tokenizer in the same folder"
        )
    if not reward.retokenize and not (reward.folder / "token_contract.json").is_file():
        raise ConfigError(
            f"{reward.path}: found no token_contract.json, expected the policy's tokenizer. "
            "Fix: set retokenize to true to pass texts in the model's own chat template"
        )
