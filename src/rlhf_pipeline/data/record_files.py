"""The records of a source on disk: Arrow IPC streams, memory-mapped when read, and row counts.

A source has examples or texts; the file of the others is empty. Examples whose answers are labelled
good or bad, and those whose prompts contain schemas or calls of tools, have files of their own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import PHASES, Phase
from rlhf_pipeline.data.records import Example, Record, Text, conversation, key, normalized_prompt
from rlhf_pipeline.errors import ArtifactError

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
LABEL = pa.field("label", pa.bool_())
EXTRA = pa.field("extra", pa.string())
"""Only in files of sources that carry further columns."""
_EXAMPLES = pa.schema(
    {
        "id": pa.string(),
        "prompt": pa.list_(MESSAGE),
        **dict.fromkeys(("chosen", "rejected", "reference"), pa.string()),
        # Of the normalised prompt, of `conversation` of it, and of prompt and answers.
        **dict.fromkeys(("prompt_key", "conversation_key", "example_key"), pa.binary(16)),
    }
)
_COPIED = ("chosen", "rejected", "reference", "extra", "label")
_TEXTS = pa.schema([("id", pa.string()), ("text", pa.string())])
_TOOLS = pa.field("tools", pa.string())
_BATCH_ROWS = 1_000
_BATCH_CHARACTERS = 8 * 2**20
"""A batch ends at either limit, so that a few huge texts do not fill the memory."""


def examples(folder: Path) -> pa.Table:
    """A source's examples, memory-mapped: those with a label, and those with tools, come last."""
    further = [folder / "labelled.arrow", folder / "with_tools.arrow"]
    paths = [folder / "examples.arrow", *filter(Path.exists, further)]
    return pa.concat_tables(map(mapped, paths), promote_options="default")


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

    A comparison serves all, a demonstration SFT, and a prompt that has no answer, or a true one,
    PPO. Labelled answers belong to the part of the reward model, for KTO.
    """
    has_chosen, has_rejected, has_reference = (
        table.column(name).is_valid().to_numpy() for name in ("chosen", "rejected", "reference")
    )
    asks = ~has_chosen | has_reference
    one = has_chosen * phase_bits(["sft"]) + asks * phase_bits(["ppo"])
    bits = np.where(has_rejected, phase_bits(PHASES), one).astype(np.uint8)
    bits[labelled(table)] = phase_bits(["reward_model"])
    return bits


def labelled(table: pa.Table) -> np.ndarray:
    """Whether the answers of each example have a label, (N,) bool."""
    has_labels = "label" in table.column_names
    return table["label"].is_valid().to_numpy() if has_labels else np.zeros(len(table), np.bool_)


def phase_bits(phases: Iterable[Phase]) -> int:
    """The phases as a bit mask."""
    return sum(1 << PHASES.index(phase) for phase in phases)


def further_columns(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The further columns of rows of the prepared files, see `ColumnMap.extra`."""
    extra = [json.loads(text or "{}") for text in rows.get("extra", ())]
    names = dict.fromkeys(name for row in extra for name in row)
    return {name: [row.get(name) for row in extra] for name in names}


def example_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The examples of a batch: id, prompt, chosen, rejected, reference, and extra and label if the
    source has them. Schemas and calls of tools are in the messages of the prompt."""
    columns = [name for name in batch.schema.names if not name.endswith("_key")]
    rows: list[dict[str, Any]] = batch.select(columns).to_pylist()
    for row in rows:
        for index, further in json.loads(row.pop("tools", None) or "{}").items():
            row["prompt"][int(index)] |= further
    return rows


def mapped(path: Path) -> pa.Table:
    """A table of an artifact, memory-mapped; ArtifactError if its offsets or texts are damaged."""
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(
            f"{path}: found {error}, expected an undamaged table. Fix: run its stage again"
        ) from error
    return table


class ArrowWriter:
    """Writes an Arrow IPC stream in batches. The same batches give the same bytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = schema
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)
        self._rows, self._characters = list[dict[str, Any]](), 0

    def add(self, row: dict[str, Any], characters: int) -> None:
        """Append a row of so many characters to the current batch."""
        self._rows.append(row)
        self._characters += characters
        if len(self._rows) == _BATCH_ROWS or self._characters > _BATCH_CHARACTERS:
            self._flush()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append a batch; keys that are not in the schema are left out."""
        self._stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._flush()
        self._stream.close()
        self._file.close()

    def _flush(self) -> None:
        if self._rows:
            self.write(self._rows)
            self._rows, self._characters = [], 0


class RecordsWriter:
    """Context manager that writes records to a folder in batches."""

    def __init__(self, folder: Path, *, has_extra: bool = False) -> None:
        schema = _EXAMPLES.append(EXTRA) if has_extra else _EXAMPLES
        with_label = schema.append(LABEL)
        further = {"labelled": with_label, "with_tools": with_label.append(_TOOLS)}
        self._schemas = {"examples": schema, "texts": _TEXTS, **further}
        self._folder, self._writers = folder, dict[str, ArrowWriter]()

    def __enter__(self) -> "RecordsWriter":
        self._writer("examples")  # these files exist without a row, too
        self._writer("texts")
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> ArrowWriter:
        if name not in self._writers:
            self._writers[name] = ArrowWriter(self._folder / f"{name}.arrow", self._schemas[name])
        return self._writers[name]

    def add(self, place: str, record: Record) -> None:
        if isinstance(record, Text):
            self._writer("texts").add({"id": place, "text": record.text}, len(record.text))
            return
        prompt, answers = record.prompt, [record.chosen or "", record.rejected or ""]
        identity = normalized_prompt(prompt)
        more = _tools(record)
        asked = [identity] if more is None else [identity, more]
        label = [] if record.label is None else [str(record.label)]
        row = {name: getattr(record, name) for name in _COPIED} | {
            "id": place,
            "prompt": [{"role": turn.role, "content": turn.content} for turn in prompt],
            "tools": more,
            "prompt_key": key(*asked),
            "conversation_key": key(conversation(identity)),
            "example_key": key(*asked, *(answer.strip() for answer in answers), *label),
        }
        name = "with_tools" if more is not None else "labelled" if label else "examples"
        characters = sum(map(len, [*(turn.content for turn in prompt), *answers]))
        self._writer(name).add(row, characters)


def _tools(example: Example) -> str | None:
    """Schemas and calls of tools as further keys of the messages, by their numbers; None: none."""
    turns = enumerate(example.prompt)
    found = {index: json.loads(turn.further) for index, turn in turns if turn.further}
    if example.tools is not None:
        found[0] = found.get(0, {}) | {"tools": json.loads(example.tools)}
    return json.dumps(found) if found else None
