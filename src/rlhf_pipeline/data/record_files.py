"""The records of a source on disk: Arrow IPC streams, memory-mapped when read.

Examples and texts have a file each. A source contains one kind; the file of the other is empty.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, Phase
from rlhf_pipeline.data.records import (
    Conversation,
    Record,
    Text,
    conversation,
    key,
    normalized_prompt,
)
from rlhf_pipeline.errors import ArtifactError

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_KEY = pa.binary(16)
_EXAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.list_(MESSAGE)),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("reference", pa.string()),
        ("prompt_key", _KEY),  # of the normalised prompt
        ("conversation_key", _KEY),  # of its beginning: system message and first user turn
        ("example_key", _KEY),  # of the normalised prompt and the answers
    ]
)
_TEXTS = pa.schema([("id", pa.string()), ("text", pa.string())])
_BATCH_ROWS = 1_000
_BATCH_CHARACTERS = 8 * 2**20
"""A batch ends at either limit, so that a few huge texts do not fill the memory."""


@dataclass(frozen=True)
class ExampleBatch:
    """A batch of examples by column, as Python values."""

    ids: list[str]
    prompts: list[Conversation]
    chosen: list[str | None]
    rejected: list[str | None]
    reference: list[str | None]


class ArrowWriter:
    """Writes an Arrow IPC stream in batches. The same batches give the same bytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = schema
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append a batch; keys that are not in the schema are left out."""
        self._stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._stream.close()
        self._file.close()


class RecordsWriter:
    """Context manager that writes records to a folder in batches."""

    def __init__(self, folder: Path) -> None:
        self._examples = _RowsWriter(folder / "examples.arrow", _EXAMPLES)
        self._texts = _RowsWriter(folder / "texts.arrow", _TEXTS)

    def __enter__(self) -> "RecordsWriter":
        return self

    def add(self, place: str, record: Record) -> None:
        if isinstance(record, Text):
            self._texts.add({"id": place, "text": record.text}, len(record.text))
            return
        prompt, answers = record.prompt, [record.chosen or "", record.rejected or ""]
        identity = normalized_prompt(prompt)
        row = {
            "id": place,
            "prompt": [{"role": turn.role, "content": turn.content} for turn in prompt],
            "chosen": record.chosen,
            "rejected": record.rejected,
            "reference": record.reference,
            "prompt_key": key(identity),
            "conversation_key": key(conversation(identity)),
            "example_key": key(identity, *(answer.strip() for answer in answers)),
        }
        self._examples.add(row, sum(map(len, [*(turn.content for turn in prompt), *answers])))

    def __exit__(self, *_: object) -> None:
        self._examples.close()
        self._texts.close()


class _RowsWriter(ArrowWriter):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        self._rows: list[dict[str, Any]] = []
        self._characters = 0

    def add(self, row: dict[str, Any], characters: int) -> None:
        self._rows.append(row)
        self._characters += characters
        if len(self._rows) == _BATCH_ROWS or self._characters > _BATCH_CHARACTERS:
            self._flush()

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        if self._rows:
            self.write(self._rows)
            self._rows, self._characters = [], 0


def examples(folder: Path) -> pa.Table:
    """A source's examples, memory-mapped."""
    return mapped(folder / "examples.arrow")


def texts(folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the ids and texts of a source, in batches."""
    for batch in mapped(folder / "texts.arrow").to_batches():
        yield batch.column("id").to_pylist(), batch.column("text").to_pylist()


def keys(table: pa.Table, column: str) -> np.ndarray:
    """A column of keys as (N, 16) uint8."""
    chunks = (chunk.buffers()[1] for chunk in table.column(column).chunks)
    return np.frombuffer(b"".join(chunks), np.uint8).reshape(-1, 16)


def first_turns(table: pa.Table, rows: np.ndarray) -> Iterator[str]:
    """Yield the first user turn of these examples; `rows` are ascending positions."""
    start = 0
    for batch in table.to_batches():
        low, high = np.searchsorted(rows, (start, start + len(batch)))
        prompts = batch.column("prompt").take(pa.array(rows[low:high] - start))
        at, turns = prompts.offsets.to_numpy()[:-1], prompts.values
        roles = turns.field("role").take(pa.array(at)).to_pylist()
        has_system = np.array(roles, object) == "system"
        yield from turns.field("content").take(pa.array(at + has_system)).to_pylist()
        start += len(batch)


def serves(table: pa.Table) -> np.ndarray:
    """The phases that each example can serve, as (N,) uint8: bit i is PHASES[i].

    A comparison can serve all phases, a demonstration SFT, a bare prompt PPO.
    """
    has_chosen = table.column("chosen").is_valid().to_numpy()
    has_rejected = table.column("rejected").is_valid().to_numpy()
    demonstration_or_prompt = np.where(has_chosen, phase_bits(["sft"]), phase_bits(["ppo"]))
    return np.where(has_rejected, phase_bits(PHASES), demonstration_or_prompt).astype(np.uint8)


def phase_bits(phases: Iterable[Phase]) -> int:
    """The phases as a bit mask."""
    return sum(1 << PHASES.index(phase) for phase in phases)


def example_batch(batch: pa.RecordBatch) -> ExampleBatch:
    """A batch as Python values."""
    columns = ("id", "prompt", "chosen", "rejected", "reference")
    return ExampleBatch(*(batch.column(name).to_pylist() for name in columns))


def mapped(path: Path) -> pa.Table:
    """A table of an artifact, memory-mapped.

    Raises ArtifactError if it is damaged: Arrow would read where its offsets lead.
    """
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(
            f"{path}: found {error}, expected an undamaged table. Fix: run its stage again"
        ) from error
    return table
