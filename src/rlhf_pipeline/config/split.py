import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, PositiveInt, field_validator

from rlhf_pipeline.config.block import Block, operational

Phase = Literal["sft", "reward_model", "ppo"]
OWN_COMPARISONS = "reward_model_own"
"""Folder of a split with the comparisons in the tokens of a reward model with another tokenizer."""
SAME_COMPARISONS = "comparisons_of_policy"
"""Input of such a reward model, for its lineage alone: the same rows in the policy's tokens."""
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The training phases that the split divides the prompts among."""
NEEDS: Mapping[Phase, str] = {
    "sft": "an answer",
    "reward_model": "chosen and rejected (kto: or a label)",
    "ppo": "a prompt with a true answer or without any, or chosen and rejected",
}
"""What a row has that can serve a phase; docs/data.md lists the columns."""

TASKS = "reasoning_gym"
"""Name of the source that generates tasks with answers."""

# A password may contain slashes, although it should not.
_LOGIN = re.compile(r"[\w+.-]+://[^/@]*(?:@|:(?!\d+/)[^@]*@)")
_LITERAL_QUERY = re.compile(r"https?://[^?]*\?(?!\$\w+$)")


def _no_secret(path: str) -> str:
    if _LOGIN.match(path):
        raise ValueError(
            "a URL with user or password would appear in logs. Fix: remove them, and set the "
            "credentials of the store in the environment"
        )
    if _LITERAL_QUERY.match(path):
        raise ValueError(
            "the query of a URL may contain a signature, which would appear in logs. Fix: "
            "export the query as an environment variable, and write ?$NAME instead"
        )
    return path


DataPath = Annotated[str, AfterValidator(_no_secret)]
"""Files of rows: a local path or a URL, without a secret."""


class ColumnMap(Block):
    """The columns of your own data. A dot selects a nested column, `question.full_text`, or an item
    of a list, `answers.0.text`; rows whose list is shorter are skipped.

    Set one of: `chosen` and `rejected`; `answers` and `scores`; `response`; the last two also with
    `label`; `messages`; `text`; or `prompt` alone.
    """

    prompt: str | tuple[str, ...] | None = None
    """The prompt: a string (one user turn) or a list of messages. Several columns of text, such as
    [instruction, input], are joined by an empty line where they are not blank. Optional if the
    answers are lists of messages that begin with the prompt."""
    chosen: str | None = None
    """The preferred answer: a string, or a list of messages that ends with it."""
    rejected: str | None = None
    """The other answer, in the same form."""
    answers: tuple[str, str] | None = None
    """Two columns of answers. `scores` decides which one is preferred."""
    scores: tuple[str, str] | None = None
    """Two columns of numbers. The answer with the higher score is preferred; ties are skipped."""
    response: str | None = Field(
        default=None, validation_alias=AliasChoices("response", "completion")
    )
    """A demonstration's answer, in the form of `chosen`. TRL's word `completion` does, too."""
    label: str | None = None
    """Whether the `response`, or with `scores` both `answers`, are good (true, 1) or bad (false,
    0): feedback for KTO alone. Null leaves it to the scores."""
    messages: str | None = None
    """A list of messages. The last one, by the assistant, is the demonstration."""
    reference: str | None = None
    """The true answer, for rewards and judges that check responses, beside all columns except
    `text`. No phase trains on it. Null: the row has none."""
    extra: tuple[str, ...] | None = None
    """Further columns for rewards and judges with a parameter of this name, beside all columns
    except `text`. No phase trains on them."""
    tools: str | None = None
    """Schemas of functions for the assistant: a list of objects, or its JSON. Not beside `text`."""
    text: str | None = None
    """A document, for `split.pretraining`."""

    def _faults(self) -> Iterator[str]:
        if self.prompt == ():
            yield "prompt: found [], expected at least one column"
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        forms = [
            {"prompt", "chosen", "rejected"}, {"chosen", "rejected"},
            {"prompt", "answers", "scores"}, {"answers", "scores"}, {"prompt", "response"},
            {"response"}, {"prompt", "response", "label"}, {"response", "label"},
            {"prompt", "answers", "scores", "label"},
            {"messages"}, {"text"}, {"prompt"},
        ]  # fmt: skip
        further = {"reference", "extra", "tools"}
        form = given - further if self.text is None else given
        if form not in forms:
            known = "; ".join(", ".join(sorted(form)) for form in forms)
            yield f"found {', '.join(sorted(given)) or 'no column'}; expected one of: {known}"
        if taken := sorted({"references", "scored"} & {*(self.extra or ())}):
            yield (
                f"extra: found {', '.join(taken)}, expected other names: rewards get something "
                "else by this name. Fix: rename the column"
            )


class SourceConfig(Block):
    """One source of rows."""

    name: str = "synthetic"
    """Name of the source (docs/data.md): a data set on the Hugging Face hub, "files" for your own
    data, or "synthetic", which needs neither network nor files."""
    path: DataPath | None = operational(None)
    """Files to read instead of the hub: a .jsonl, .json, .csv, .parquet or .txt file (also .gz), a
    glob, or a folder of `save_to_disk`; a local path or an fsspec URL (s3://...). The query of a
    signed HTTP URL is an environment variable: `https://host/pairs.jsonl?$NAME`."""
    revision: str | None = None
    """Branch, tag or commit on the hub; only a commit is repeatable. None: the newest commit."""
    subset: str | None = None
    """Configuration ("subset") of the data set on the hub. None: the default of the source."""
    split: str | None = None
    """Split of the data set on the hub, or of a saved DatasetDict. None: "train" in most cases."""
    columns: ColumnMap | None = None
    """For "files" and any data set of the hub: the columns to read. None: those of TRL's formats,
    whichever the file has, or those of the source."""
    samples: PositiveInt | None = None
    """Number of rows that the synthetic source (None: 30,000) or reasoning_gym generates, or
    maximum number of rows to read of any other source (None: all)."""
    tasks: dict[str, dict[str, Any]] | None = Field(default=None, min_length=1)
    """For "reasoning_gym": its tasks with equal shares of the rows, each with parameters in the
    place of its defaults, such as {chain_sum: {max_terms: 3}, spell_backward: {}}."""

    def _faults(self) -> Iterator[str]:
        for field in ("revision", "subset"):
            if self.path is not None and getattr(self, field) is not None:
                yield (
                    f"found path (files) and {field} (hub); expected only one of them. Fix: remove "
                    "one of them"
                )
        if self.columns is not None and self.name != "files" and "/" not in self.name:
            yield (
                f"source {self.name!r} has fixed columns. Fix: remove columns, or set name to "
                "'files' or to a data set of the hub"
            )
        if self.name == TASKS and None in (self.tasks, self.samples):
            yield "found no tasks or samples, expected both for reasoning_gym. Fix: set them"
        if self.tasks is not None and self.name != TASKS:
            yield f"source {self.name!r} has no tasks. Fix: remove tasks, or set name to '{TASKS}'"

    def label(self) -> str:
        """The source in reports: name, and in brackets subset, split and file without query."""
        path = self.path or ""
        # In other paths, a question mark belongs to a glob.
        file = path.partition("?")[0] if path.startswith("http") else path
        details = ", ".join(
            filter(None, (self.subset, self.split, file.rstrip("/").rpartition("/")[2]))
        )
        return f"{self.name} ({details})" if details else self.name


class BlendedSourceConfig(SourceConfig):
    """One source of the split: how much of it is used, and for which phases."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the source's distinct prompts to use. A smaller share is part of a larger one."""
    phases: tuple[Phase | Literal["test"], ...] | None = Field(default=None, min_length=1)
    """Phases that may use the source. None: all that its rows can serve; ["test"]: all its prompts
    belong to the final evaluation, and their conversations leave all other sources."""

    @property
    def is_test(self) -> bool:
        return self.phases == ("test",)

    def may_serve(self, phase: Phase) -> bool:
        return self.phases is None or phase in self.phases

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.is_test and "test" in (self.phases or ()):
            yield (
                f"phases: found test beside other phases in {list(self.phases or ())}, expected "
                "test alone. Fix: list the source's other files as another source"
            )

    def reading(self) -> SourceConfig:
        """The fields that decide the records."""
        return SourceConfig(**{name: getattr(self, name) for name in SourceConfig.model_fields})


class PretrainingConfig(Block):
    """Plain text for PPO's language-model loss (ptx), packed into blocks of equal length."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Sources of text. "files" reads the column `text` unless `columns` sets another one."""
    block_tokens: int = Field(ge=2)
    """Tokens of a block, cut from documents that are joined by EOS. The last rest is left out."""

    def readings(self) -> list[SourceConfig]:
        return [
            source.model_copy(update={"columns": ColumnMap(text="text")})
            if source.name == "files" and source.columns is None
            else source
            for source in self.sources
        ]


class SplitConfig(Block):
    """How the sources are split into disjoint parts for the three phases, validation and test."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a rejected path may contain a secret

    sources: tuple[BlendedSourceConfig, ...] = Field(min_length=1)
    """Sources, read in this order. All rows of a conversation (system message and first user turn),
    from any source, are in one part."""
    weights: tuple[float, float, float] = (2, 4, 4)
    """Weights of SFT, reward model and PPO in the distinct conversations that are not held out; 2,
    4, 4 as in DeepSpeed-Chat. A phase that no stage uses has weight 0 whatever this says."""
    held_back: float = Field(default=0, ge=0, lt=1)
    """Share of the reward model's conversations that only the second reward model trains on. A run
    sets it from `evaluate.judge_model.held_back`."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the distinct conversations for the validation of all three phases."""
    test_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the distinct conversations for the final evaluation alone."""
    near_duplicates: Literal["drop", "keep"] = "drop"
    """What to do with a conversation whose first user turn nearly repeats a held-out one (Jaccard
    similarity of 5-grams of words at least 0.8); keep is for prompts that repeat one long
    instruction."""
    without_reference: Literal["error", "drop"] = "error"
    """What to do with prompts without a true answer if a reward or a judge reads true answers:
    refuse the run, or keep them out of PPO and the final evaluation."""
    max_prompt_tokens: PositiveInt
    """Maximum length of a prompt in tokens, including the chat template."""
    max_response_tokens: PositiveInt
    """Maximum length of a response in tokens, including EOS."""
    over_long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What to do with longer prompts: stop at the first one, leave the row out, or keep the newest
    tokens and a leading BOS."""
    over_long_responses: Literal["error", "drop", "truncate"] = "error"
    """What to do with longer answers: as for prompts, but truncate keeps the beginning without EOS,
    so the model does not learn to end there."""
    sft_loss: Literal["response", "assistant", "all"] = "response"
    """Tokens that SFT learns: the final response; every turn of the assistant; or all tokens,
    including the prompt (as DeepSpeed-Chat does)."""
    pretraining: PretrainingConfig | None = None
    """Text for PPO's language-model loss. None: no text."""
    max_bad_fraction: float = operational(0.0, ge=0, le=1)
    """Fraction of a source's rows that may be bad (no answer, malformed dialogue, ...). More stop
    the run; Anthropic/hh-rlhf needs about 0.01."""

    @field_validator("weights")
    @classmethod
    def _usable_weights(cls, weights: tuple[float, float, float]) -> tuple[float, float, float]:
        if any(not 0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ValueError(
                f"found {list(weights)}; expected finite, non-negative numbers, at least one "
                "positive"
            )
        return weights

    def _faults(self) -> Iterator[str]:
        if self.validation_fraction + self.test_fraction >= 1:
            yield (
                f"validation_fraction {self.validation_fraction} + test_fraction "
                f"{self.test_fraction} leave no prompt to train on. Fix: make their sum less than 1"
            )
        for index, source in enumerate(self.sources):
            if source.reading() in self.readings()[:index]:
                yield f"source {source.label()!r} is listed twice. Fix: list it once"

    @property
    def weight_of(self) -> dict[Phase, float]:
        return dict(zip(PHASES, self.weights, strict=True))

    def unserved(self, kinds: Collection[Collection[Phase]]) -> list[Phase]:
        """The phases of a positive weight that none of some kinds of rows can serve."""
        weighed = [phase for phase, weight in self.weight_of.items() if weight and kinds]
        return [phase for phase in weighed if not any(phase in kind for kind in kinds)]

    def readings(self) -> list[SourceConfig]:
        """For each source, the fields that decide its records."""
        return [source.reading() for source in self.sources]
