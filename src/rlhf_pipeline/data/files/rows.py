"""Read data files of any format and store as one stream of rows."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from textwrap import shorten

import pyarrow as pa

from rlhf_pipeline.data.files.arrow_rows import parquet_rows, saved_rows
from rlhf_pipeline.data.files.json_rows import json_lines, json_rows
from rlhf_pipeline.data.files.location import File, Format, find_files
from rlhf_pipeline.data.files.stream import FileFault, Stream, open_stream
from rlhf_pipeline.data.files.text_rows import csv_rows, text_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.redaction import without_secrets

_READERS: dict[Format, Callable[[Stream], Iterator[tuple[int, Row | Unused]]]] = {
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

    Memory is constant, except for a JSON array, which is read whole. A place is "name.jsonl:17", by
    line (JSON arrays, Parquet and saved data sets: by row) from 1. A broken row is `Unused`; the
    rows after it are read. `columns` are those that the caller reads, dotted if nested, or empty
    for all; rows may lack all others. `split` is that of a saved DatasetDict. Raises DataError if a
    file is not found, not reachable, damaged or empty.
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


def _file_rows(file: File, columns: Sequence[str]) -> Iterator[tuple[int, Row | Unused]]:
    with open_stream(file) as stream:
        yield from (
            parquet_rows(stream, columns)
            if file.format == "parquet"
            else _READERS[file.format](stream)
        )


def _with_places(
    name: str, shown: str, rows: Iterator[tuple[int, Row | Unused]]
) -> Iterator[tuple[str, Row | Unused]]:
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
