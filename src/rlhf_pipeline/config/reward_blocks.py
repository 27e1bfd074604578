"""The parameter block of each kind of reward. A field that no other kind has tells its kind."""

import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

import regex
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from rlhf_pipeline.config.base_model import TEMPLATE_DATE
from rlhf_pipeline.config.block import Block, Precision, operational
from rlhf_pipeline.config.doors import Door

REWARD = Door("reward", {})
"""Functions that score responses: rewards, and judges."""
_SECRET = re.compile(
    r"(?!prompt_cache_key|(bos|eos|pad|unk)_token)"
    r"(\w*keys?|(\w*_)?(token|secret|password|auth|authorization|headers?))"
)
"""The name of a field with a secret."""
_CALLABLE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


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
    """A Python function `reward(prompts, responses)`; see `rollout.function_reward`."""

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
    """The chat model."""
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
