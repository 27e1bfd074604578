"""The prepared files, Arrow IPC streams: their columns, rows, and counts of dropped rows."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.evaluate import JUDGE_MODEL
from rlhf_pipeline.config.split import OWN_COMPARISONS, Phase, SplitConfig
from rlhf_pipeline.data.record_files import EXTRA, MESSAGE, ArrowWriter
from rlhf_pipeline.data.tokenization import (
    ANSWERS,
    Answer,
    Limited,
    Tokenized,
    limited,
    newest_values,
)
from rlhf_pipeline.errors import DataError

Part = Literal["test", "validation", "sft", "reward_model", "ppo", "judge_model"]
PARTS: tuple[Part, ...] = get_args(Part)
HELD_OUT: Part = "validation"
_IDS = pa.list_(pa.int32())
_PROMPT = {"id": pa.string(), "prompt_ids": _IDS}
DEMONSTRATION = pa.schema(_PROMPT | {"response_ids": _IDS, "loss_mask": pa.list_(pa.bool_())})
COMPARISON = pa.schema(_PROMPT | {"chosen_ids": _IDS, "rejected_ids": _IDS})
_ANSWER = pa.schema(_PROMPT | {"response_ids": _IDS, "label": pa.bool_()})
_REWARDED = pa.schema(
    _PROMPT | {"source": pa.string(), "messages": pa.list_(MESSAGE), "reference": pa.string()}
)


@dataclass(frozen=True)
class Table:
    """One prepared file."""

    path: str
    part: Part
    """The part whose prompts it contains."""
    phase: Phase | None
    """The phase that can use its rows; None: no matter which."""
    answers: tuple[Answer, ...]
    """The answers that its rows need. Without any, it contains each distinct prompt once."""
    schema: pa.Schema
    labelled: bool = False
    """Whether it contains labelled answers alone, one in each row."""

    @property
    def folder(self) -> str:
        return self.path.partition("/")[0]


_FOLDERS: tuple[tuple[str, Part, Phase, tuple[Answer, ...], pa.Schema], ...] = (
    ("sft", "sft", "sft", ("chosen",), DEMONSTRATION),
    ("reward_model", "reward_model", "reward_model", ANSWERS, COMPARISON),
    ("ppo", "ppo", "ppo", (), _REWARDED),
    ("kto", "reward_model", "reward_model", ANSWERS, _ANSWER),
    (JUDGE_MODEL, "judge_model", "reward_model", ANSWERS, COMPARISON),
    (OWN_COMPARISONS, "reward_model", "reward_model", ANSWERS, COMPARISON),
)
FOR_REWARD = JUDGE_MODEL, OWN_COMPARISONS
"""Folders in the tokens of the reward model, if those are not the policy's."""
TABLES = (
    *(
        Table(f"{folder}/{name}.arrow", part, phase, answers, schema, folder == "kto")
        for folder, training, phase, answers, schema in _FOLDERS
        for name, part in (("train", training), ("validation", HELD_OUT))
    ),
    Table("evaluation/test.arrow", "test", None, (), _REWARDED),
)


def tables(config: SplitConfig, *, has_own: bool) -> list[Table]:
    """The files of a split; `has_own` if the reward model has tokens of its own."""
    left_out = {JUDGE_MODEL: not config.held_back, OWN_COMPARISONS: not has_own}
    return [one for one in TABLES if not left_out.get(one.folder)]


def parts(config: SplitConfig) -> list[Part]:
    """The parts of a split."""
    return [part for part in PARTS if config.held_back or part != JUDGE_MODEL]


@dataclass
class PhaseFile:
    """One file being written."""

    table: Table
    output: Path
    wanted: np.ndarray
    """(N,) bool: the rows of the blend that belong to the file."""
    duplicates_merged: int
    """Rows left out because of a repeated prompt."""
    has_extra: bool = False
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    lengths: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """For each column of token ids: length -> number of rows."""
    written: list[np.ndarray] = field(default_factory=lambda: [np.empty(0, np.int64)])
    """Positions in the blend of the rows that were written."""

    def __post_init__(self) -> None:
        schema = self.table.schema
        if self.has_extra and "reference" in schema.names:
            schema = schema.append(EXTRA)
        self._writer = ArrowWriter(self.output / self.table.path, schema)

    def add(self, rows: list["Row"], numbers: np.ndarray, config: SplitConfig) -> None:
        """Append the rows that belong to the file and fit; `numbers` are those of the blend."""
        kept: list[int] = []
        written: list[dict[str, Any]] = []
        for index in np.flatnonzero(self.wanted[numbers]).tolist():
            row = rows[index]
            prompt = row.dialogue if self.table.phase == "sft" else row.prompt
            answers = row.answers if self.table.labelled else self.table.answers
            parts = [prompt, *(row.answers[answer] for answer in answers)]
            if reason := next((part.dropped for part in parts if part.dropped), None):
                self.dropped[reason] += 1
                continue
            self.cut.update(part.cut for part in parts if part.cut)
            kept.append(index)
            written += self._values(row, config)
        if kept:
            self._writer.write(written)
            self.rows += len(written)
            self.written.append(numbers[kept])
            for name in filter(lambda name: name.endswith("_ids"), self.table.schema.names):
                self.lengths[name].update(len(values[name]) for values in written)

    def close(self) -> None:
        """Finish the file; raise DataError if all its rows were dropped."""
        self._writer.close()
        if self.dropped and not self.rows:
            raise DataError(
                f"{self.table.path}: all {self.dropped.total()} rows were dropped "
                f"({dict(self.dropped)}). Fix: raise split.max_prompt_tokens or "
                "split.max_response_tokens."
            )

    def describe(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "duplicates_merged": self.duplicates_merged,
            "dropped": self.dropped,
            "truncated": self.cut,
            "tokens": {column: summary(lengths) for column, lengths in self.lengths.items()},
        }

    def _values(self, row: "Row", config: SplitConfig) -> list[dict[str, Any]]:
        """The rows of the file by column, with further columns."""
        values = row.example | {
            "prompt_ids": row.prompt.ids,
            "source": row.source,
            "messages": row.example["prompt"],
            **{f"{answer}_ids": text.ids for answer, text in row.answers.items()},
        }
        if self.table.labelled:
            return [values | {"response_ids": text.ids} for text in row.answers.values()]
        return [values | demonstration(row, config) if self.table.phase == "sft" else values]


@dataclass(frozen=True, slots=True)
class Row:
    """One example, its texts cut to the limits."""

    source: str
    example: dict[str, Any]
    """As `record_files.example_rows` has it."""
    prompt: Limited
    answers: dict[Answer, Limited]
    dialogue: Limited
    """The prompt for SFT. If SFT learns earlier turns, they are tokenized like responses."""
    spoken: list[bool]
    """One for each token of `dialogue`: True for a token of the assistant."""


@dataclass(frozen=True)
class RowMaker:
    """Applies the limits, and drops a prompt whose cut text belongs to another part already."""

    config: SplitConfig
    bos_id: int | None
    _full_prompts: dict[bytes, Part] = field(default_factory=dict)

    def make(self, source: str, example: dict[str, Any], tokens: Tokenized, part: Part) -> Row:
        """The example as a row; raises DataError if it is too long and `over_long_*` is "error"."""
        config, bos_id = self.config, self.bos_id
        prompt = self._keep_apart(limited(tokens.id, "prompt", tokens.prompt, config, bos_id), part)
        answers: dict[Answer, Limited] = {
            answer: limited(tokens.id, answer, ids, config)
            for answer in ANSWERS
            if (ids := getattr(tokens, answer)) is not None
        }
        dialogue, spoken = prompt, [False] * len(prompt.ids)
        if tokens.turns is not None and not prompt.dropped:
            ids, by_assistant = tokens.turns
            dialogue = limited(tokens.id, "prompt", ids, config, bos_id)
            spoken = newest_values(ids, by_assistant, len(dialogue.ids), bos_id)
        return Row(source, example, prompt, answers, dialogue, spoken)

    def _keep_apart(self, prompt: Limited, part: Part) -> Limited:
        """Drop a cut prompt that equals one of another part, which keeps it."""
        config = self.config
        if config.over_long_prompts != "truncate" or len(prompt.ids) < config.max_prompt_tokens:
            return prompt
        # The digest, since all ids would fill the memory.
        digest = hashlib.sha256(np.array(prompt.ids, np.int32).tobytes()).digest()
        owner = self._full_prompts.setdefault(digest, part)
        if owner == part:
            return prompt
        return Limited(prompt.ids, dropped=f"prompt that, once cut, equals one of {owner}")


def demonstration(row: Row, config: SplitConfig) -> dict[str, Any]:
    """The columns of SFT: prompt, response and loss mask.

    `response_ids` begins with the first learned token. `loss_mask` is True for the tokens of it
    that `config.sft_loss` selects, including EOS. Nothing predicts the first token of a dialogue.
    """
    prompt, response = row.dialogue.ids, row.answers["chosen"].ids
    learned = [True] * len(prompt) if config.sft_loss == "all" else row.spoken
    learned = [False, *learned[1:], *([True] * len(response))]
    ids, start = prompt + response, learned.index(True)
    return {"prompt_ids": ids[:start], "response_ids": ids[start:], "loss_mask": learned[start:]}


def summary(counts: Mapping[int, int]) -> dict[str, int]:
    """Total, maximum and percentiles (nearest rank) of lengths; `counts`: length -> number."""
    lengths, rows = np.array([*counts], np.int64), np.array([*counts.values()], np.int64)
    percentiles = np.percentile(lengths, (50, 90, 99), weights=rows, method="inverted_cdf")
    p50, p90, p99 = map(int, percentiles)
    return {"total": int(lengths @ rows), "max": max(counts), "p50": p50, "p90": p90, "p99": p99}
