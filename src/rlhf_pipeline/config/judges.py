"""The judges of an evaluation beside the reward model and the gold score."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag, field_validator

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.precision import Precision
from rlhf_pipeline.config.rewards import CallableReward, ModelReward

_FORMS = (
    "expected 'FILE.py:FUNCTION', 'PACKAGE.MODULE:FUNCTION', or a block with one of callable, "
    "model, reference and openai"
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
        return ModelReward(
            path=str(folder), name=self.name, retokenize=self.retokenize, precision=self.precision
        )


class ReferenceJudge(Block):
    """The true answer, where the data have one (`columns.reference` of a source)."""

    reference: Literal["exact", "contains", "last_number"]
    """What counts as right, without regard to case, white space and a final full stop. exact: the
    answer is the true answer; contains: it contains it; last_number: its last number is that of the
    true answer."""
    name: str | None = None
    """Name of the judge. None: the kind of agreement."""

    @property
    def label(self) -> str:
        return self.name or self.reference


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


class PairwiseJudge(Block):
    """A chat model that compares two answers, in both orders."""

    openai: ChatConfig
    name: str | None = None
    """Name of the judge. None: the last part of the model's name."""

    @property
    def label(self) -> str:
        return self.name or self.openai.model.rpartition("/")[2]


def _short_form(judge: Any) -> Any:
    return {"callable": judge} if isinstance(judge, str) else judge


def _kind(value: Any) -> str | None:
    given = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    kinds = ("callable", "model", "reference", "openai")
    return next((kind for kind in kinds if kind in given), None)


Judge = Annotated[
    Annotated[CallableReward, Tag("callable")]
    | Annotated[ModelJudge, Tag("model")]
    | Annotated[ReferenceJudge, Tag("reference")]
    | Annotated[PairwiseJudge, Tag("openai")],
    Discriminator(_kind, custom_error_type="judge", custom_error_message=_FORMS),
    BeforeValidator(_short_form),
]


def local_source(judge: Judge) -> Block:
    """A reward model in a local folder as a source of rewards; other judges as they are."""
    if isinstance(judge, ModelJudge) and judge.folder is not None:
        return judge.as_reward(judge.folder)
    return judge
