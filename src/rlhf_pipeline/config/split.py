"""Parameters of the split: what is read, how it is divided, how long it may be."""

from __future__ import annotations

import re
from typing import Literal, Self, get_args

from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from rlhf_pipeline.config.block import Block, operational

Phase = Literal["sft", "reward_model", "ppo"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The training phases that the split divides the prompts among."""

_LOGIN = re.compile(
    r"[\w+.-]+://[^/@]*(?:@|:(?!\d+/)[^@]*@)"
)  # a password may hold slashes, though it should not
_WRITTEN_QUERY = re.compile(r"https?://[^?]*\?(?!\$\w+$)")


class ColumnMap(Block):
    """Which columns of a file of your own hold what. A dot reaches into a nested column: `question.full_text`.

    Name one of: `chosen` and `rejected`; `answers` and `scores`; `response`; `messages`; `text`; or `prompt` alone.
    """

    prompt: str | None = None
    """The prompt: a string (one user turn) or a list of messages. May be left out where the answers are lists of messages
    that begin with it."""

    chosen: str | None = None
    """The preferred answer: a string, or a list of messages that ends with it."""

    rejected: str | None = None
    """The other answer, in the same form."""

    answers: tuple[str, str] | None = None
    """Two columns of answers, to be compared by `scores`."""

    scores: tuple[str, str] | None = None
    """Two columns of numbers: the answer with the higher one is the chosen one; rows with a tie are passed over."""

    response: str | None = None
    """A demonstration's answer, in the form of `chosen`."""

    messages: str | None = None
    """A list of messages whose last one, the assistant's, is a demonstration."""

    reference: str | None = None
    """Beside any of them but `text`: the true answer, for rewards that check responses against it (`ppo.rewards`). No phase
    trains on it. Null in a row: it has none."""

    text: str | None = None
    """A document, for `split.pretraining`."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        forms = [
            {"prompt", "chosen", "rejected"}, {"chosen", "rejected"}, {"prompt", "answers", "scores"},
            {"prompt", "response"}, {"response"}, {"messages"}, {"text"}, {"prompt"},
        ]  # fmt: skip
        form = given - {"reference"} if self.text is None else given
        if form not in forms:
            known = "; ".join(", ".join(sorted(form)) for form in forms)
            raise ValueError(
                f"{', '.join(sorted(given)) or 'no column'} is no form of data; name one of: {known}"
            )
        return self


class SourceConfig(Block):
    """Where rows are read from."""

    name: str = "synthetic"
    """Key of the source in the registry: the data set's name on the Hugging Face hub, "files" for data of your own, or
    "synthetic" (the default, which needs neither network nor files)."""

    path: str | None = operational(None)
    """Read from here instead of the hub: a .jsonl, .json, .csv, .parquet or .txt file (also .gz), a glob of such files, or
    a folder written by `save_to_disk`; local or any fsspec URL (s3://...); `~` is expanded. The query of an HTTP URL, which
    may sign it, is given in the environment: `https://host/pairs.jsonl?$NAME`. What counts for the cache is the files' names
    and bytes, not where they lie."""

    revision: str | None = None
    """Branch, tag or commit on the hub. None is the newest; name a commit to be able to repeat a run."""

    subset: str | None = None
    """Configuration of the data set on the hub. None: the source's usual one."""

    split: str | None = None
    """Split that is read, on the hub or of a saved DatasetDict. None: the source's usual one, mostly "train"."""

    columns: ColumnMap | None = None
    """For "files": which columns hold what. None: prompt, chosen and rejected."""

    samples: PositiveInt | None = None
    """How many rows a synthetic source generates (None: 30,000), or at most how many are read of any other (None:
    all)."""

    @field_validator("path")
    @classmethod
    def _no_secret(cls, path: str | None) -> str | None:
        if path is not None and _LOGIN.match(path):
            raise ValueError(
                "a URL with a user or password would end up in logs; give the store's keys in the environment"
            )
        if path is not None and _WRITTEN_QUERY.match(path):
            raise ValueError(
                "a URL's query, which may sign it, would end up in logs; export it as an environment variable, and write "
                "?$NAME in its place"
            )
        return path

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        for field in ("revision", "subset"):
            if self.path is not None and getattr(self, field) is not None:
                raise ValueError(
                    f"path reads files and {field} is about the hub; set only one of them"
                )
        if self.columns is not None and self.name != "files":
            raise ValueError(
                f"source {self.name!r} knows its columns; remove columns, or name the source 'files'"
            )
        return self

    def label(self) -> str:
        """How reports call it: its name, and in brackets what of it is read. No query of a signed URL."""
        path = self.path or ""
        file = (
            path.partition("?")[0] if path.startswith("http") else path
        )  # elsewhere a question mark is a glob's
        details = ", ".join(
            filter(None, (self.subset, self.split, file.rstrip("/").rpartition("/")[2]))
        )
        return f"{self.name} ({details})" if details else self.name


class BlendedSourceConfig(SourceConfig):
    """One source of the split, and how much of it goes where."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the source's distinct prompts that is used. A smaller share is part of a larger one."""

    phases: tuple[Phase, ...] | None = Field(default=None, min_length=1)
    """Phases that may train on it. None: all that it can serve (demonstrations: SFT; comparisons: all three)."""

    def records(self) -> SourceConfig:
        """What decides the records that are read."""
        return SourceConfig(**{name: getattr(self, name) for name in SourceConfig.model_fields})


class PretrainingConfig(Block):
    """Plain text for PPO's language-model loss (ptx), packed into blocks of equal length."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Sources of text. Of "files", the column `text` is read unless `columns` names another one; a .txt file is all text."""

    block_tokens: int = Field(ge=2)
    """Length of a block. Documents are joined by EOS and cut into blocks; the last incomplete one is left out."""

    def records(self) -> list[SourceConfig]:
        """The sources, each with its columns."""
        return [
            source.model_copy(update={"columns": ColumnMap(text="text")})
            if source.name == "files" and source.columns is None
            else source
            for source in self.sources
        ]


class SplitConfig(Block):
    """How the sources become disjoint sets for the three phases, validation and test."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a path that is refused for its secret

    sources: tuple[BlendedSourceConfig, ...] = Field(min_length=1)
    """What is read, in this order. A prompt that occurs in several sources lands in one part all the same."""

    weights: tuple[float, float, float] = (2, 4, 4)
    """Shares of SFT, reward model and PPO in the distinct prompts that are not held out; only their ratio counts.
    2, 4, 4 is DeepSpeed-Chat's default, so that results stay comparable. Prompts that not every phase can use are divided
    among those that can."""

    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the distinct prompts that validates all three phases and trains none."""

    test_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the distinct prompts that only the evaluation sees."""

    max_prompt_tokens: PositiveInt
    """Longest prompt in tokens, chat template included."""

    max_response_tokens: PositiveInt
    """Longest response in tokens, EOS included."""

    over_long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to a row with a longer prompt. "error" names the first one, so that nothing disappears unseen; "drop"
    leaves such rows out; "truncate" keeps the newest tokens (and a leading BOS). The report counts either."""

    over_long_responses: Literal["error", "drop", "truncate"] = "error"
    """What happens to a row with a longer answer. "truncate" keeps its beginning, without EOS: the model is not taught to
    end there. The report counts the rows that lost their EOS."""

    sft_loss: Literal["response", "assistant", "all"] = "response"
    """Tokens that SFT learns: the final response; every assistant turn of the dialogue; or all tokens, the prompt's too
    (as DeepSpeed-Chat does)."""

    pretraining: PretrainingConfig | None = None
    """Text for PPO's language-model loss. None: none is prepared."""

    max_bad_fraction: float = operational(0.0, ge=0, le=1)
    """Fraction of a source's rows that may be unusable (no answer, dialogue that does not parse ...) before the run stops.
    0, so that bad rows are looked at once; Anthropic/hh-rlhf needs about 0.01."""

    @field_validator("weights")
    @classmethod
    def _usable_weights(cls, weights: tuple[float, float, float]) -> tuple[float, float, float]:
        if any(not 0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ValueError(
                f"{list(weights)} must be finite and not negative, and at least one must be positive"
            )
        return weights

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"validation_fraction {self.validation_fraction} + test_fraction {self.test_fraction} leave no prompt "
                "to train on; make their sum less than 1"
            )
        return self

    @model_validator(mode="after")
    def _distinct_sources(self) -> Self:
        for index, source in enumerate(self.sources):
            if source.records() in self.records()[:index]:
                raise ValueError(f"source {source.label()!r} is listed twice; list it once")
        return self

    def records(self) -> list[SourceConfig]:
        """What decides the records of each source, whatever becomes of them."""
        return [source.records() for source in self.sources]
