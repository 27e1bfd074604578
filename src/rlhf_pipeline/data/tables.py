"""The prepared files: their rows, their columns, and their writer.

The format is Arrow IPC streams, which `datasets.Dataset.from_file` memory-maps without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_pipeline.config.split import Phase
from rlhf_pipeline.data.parts import Part
from rlhf_pipeline.data.record_files import MESSAGE
from rlhf_pipeline.data.tokenization import Answer

_IDS = pa.list_(pa.int32())
_PROMPT = {"id": pa.string(), "prompt_ids": _IDS}


@dataclass(frozen=True)
class Table:
    """One prepared file."""

    path: str
    """Relative to the folder of all prepared files."""

    part: Part
    """The part whose prompts it contains."""

    phase: Phase | None
    """The file contains only rows that this phase can use; None: all rows."""

    answers: tuple[Answer, ...]
    """The answers that its rows need. Without answers, it contains each distinct prompt once."""

    columns: dict[str, pa.DataType]
    """Names and types."""

    @property
    def schema(self) -> pa.Schema:
        """The columns as an Arrow schema."""
        return pa.schema(list(self.columns.items()))


_DEMONSTRATION = _PROMPT | {"response_ids": _IDS, "loss_mask": pa.list_(pa.bool_())}
_COMPARISON = _PROMPT | {"chosen_ids": _IDS, "rejected_ids": _IDS}
_REWARDED = _PROMPT | {
    "source": pa.string(),
    "messages": pa.list_(MESSAGE),
    "reference": pa.string(),
}

TABLES = (
    Table("sft/train.arrow", "sft", "sft", ("chosen",), _DEMONSTRATION),
    Table("sft/validation.arrow", "validation", "sft", ("chosen",), _DEMONSTRATION),
    Table(
        "reward_model/train.arrow",
        "reward_model",
        "reward_model",
        ("chosen", "rejected"),
        _COMPARISON,
    ),
    Table(
        "reward_model/validation.arrow",
        "validation",
        "reward_model",
        ("chosen", "rejected"),
        _COMPARISON,
    ),
    Table("ppo/train.arrow", "ppo", "ppo", (), _REWARDED),
    Table("ppo/validation.arrow", "validation", "ppo", (), _REWARDED),
    Table("evaluation/test.arrow", "test", None, (), _REWARDED),
)
PRETRAINING = "pretraining/train.arrow"


class TableWriter:
    """Writes rows to a file in batches. The same batches give the same bytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = schema
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def write(self, columns: dict[str, list[Any]]) -> None:
        """Append a batch by columns."""
        self._stream.write_batch(pa.RecordBatch.from_pydict(columns, schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        self._stream.close()
        self._file.close()
