"""Read data files of any format and store as one stream of rows.

Parquet files, and folders written by `save_to_disk` of the datasets library, are read here.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from textwrap import shorten
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_pipeline.data.files.location import File, Format, explain_store_errors, find_files
from rlhf_pipeline.data.files.stream import FileFault, Numbered, Stream, open_stream
from rlhf_pipeline.data.files.text_rows import csv_rows, json_lines, json_rows, text_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError, without_secrets

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 1_000

_READERS: dict[Format, Callable[[Stream], Numbered]] = {
    "jsonl": json_lines,
    "json": json_rows,
    "csv": csv_rows,
    "txt": text_rows,
}
"""Readers of all formats but Parquet, which is read column by column."""

_DAMAGE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
"""Exceptions for a damaged file; UnicodeDecodeError stems from the name of a Parquet column."""


def read_rows(path: str, columns: Sequence[str], split: str) -> Iterator[tuple[str, Row | Unused]]:
    """Yield every row with its place, file after file by name.

    Memory is constant. A place is "name.jsonl:17", by line (JSON arrays, Parquet and saved data
    sets: by row) from 1. A broken row is `Unused`; the rows after it are read. `columns` are those
    that the caller reads, dotted if nested, or empty for all; rows may lack all others. `split` is
    that of a saved DatasetDict. Raises DataError if a file is not found, not reachable, damaged or
    empty.
    """
    location = find_files(path)
    if location.saved is not None:
        folder = location.saved
        name = folder.rpartition("/")[2]
        if any(file.name == "dataset_dict.json" for file in location.files):
            name += f"/{split}"
        yield from _with_places(name, without_secrets(folder), saved_rows(folder, columns, split))
    else:
        for file in location.files:
            yield from _with_places(file.name, file.display_name, _file_rows(file, columns))


def _file_rows(file: File, columns: Sequence[str]) -> Numbered:
    with open_stream(file) as stream:
        is_parquet = file.format == "parquet"
        yield from parquet_rows(stream, columns) if is_parquet else _READERS[file.format](stream)


def _with_places(name: str, shown: str, rows: Numbered) -> Iterator[tuple[str, Row | Unused]]:
    line = 0
    try:
        for line, row in rows:
            yield f"{name}:{line}", row
    except FileFault as fault:
        raise DataError(f"{shown}:{fault.line}: {fault}") from None
    except _DAMAGE as error:
        raise DataError(
            f"{shown}:{line + 1}: the file is damaged from here on ({shorten(str(error), 300)}). "
            "Fix: download or create the file again."
        ) from error
    if line == 0:
        raise DataError(
            f"{shown}: the file contains no rows. Fix: download or create the file again, or set "
            "`path` to another one."
        )


def parquet_rows(stream: Stream, columns: Sequence[str]) -> Numbered:
    """Yield the rows of a Parquet file, numbered from 1."""
    file = pq.ParquetFile(stream)
    yield from _number_rows(
        file.iter_batches(_BATCH_ROWS, columns=_requested_columns(columns, file.schema_arrow.names))
    )


def saved_rows(folder: str, columns: Sequence[str], split: str) -> Numbered:
    """Yield the rows, numbered from 1, of a saved Dataset or of one split of a DatasetDict."""
    import datasets  # imported late: the import takes a second

    with explain_store_errors(folder):
        saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            shown = without_secrets(folder)
            raise DataError(
                f"{shown}: split {split!r} not found. Fix: set the source's `split` to one of: "
                f"{', '.join(saved)}."
            )
        saved = saved[split]
    yield from data_set_rows(saved, _requested_columns(columns, saved.column_names))


def data_set_rows(data_set: "datasets.Dataset", columns: list[str]) -> Numbered:
    """Yield these columns of every row of a data set, numbered from 1."""
    chosen = data_set.select_columns(columns).with_format("arrow")
    yield from _number_rows(chosen.iter(_BATCH_ROWS))


def _requested_columns(columns: Sequence[str], names: list[str]) -> list[str]:
    """The file's columns that are requested, directly or as the start of a dotted path.

    All columns if a requested one is missing: the message about it lists them.
    """
    starts = {column: column.partition(".")[0] for column in columns}
    if any(column not in names and start not in names for column, start in starts.items()):
        return names
    requested = {*starts, *starts.values()}
    return [name for name in names if not requested or name in requested]


def _number_rows(batches: Iterable[pa.RecordBatch | pa.Table]) -> Numbered:
    return enumerate(chain.from_iterable(map(_rows_of_batch, batches)), start=1)


def _rows_of_batch(batch: pa.RecordBatch | pa.Table) -> list[Row | Unused]:
    try:
        batch.validate(full=True)  # converting a damaged batch would crash the process
        return batch.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError):
        if batch.num_rows == 1:
            return [Unused("a value that is not valid, such as text that is not UTF-8")]
        return [
            row for index in range(batch.num_rows) for row in _rows_of_batch(batch.slice(index, 1))
        ]
