"""Reading data files: one stream of rows, whatever the format and the store."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from textwrap import shorten

import pyarrow as pa

from rlhf_pipeline.data.files.arrow_rows import parquet_rows, saved_rows
from rlhf_pipeline.data.files.json_rows import json_lines, json_rows
from rlhf_pipeline.data.files.location import File, Format, find
from rlhf_pipeline.data.files.stream import FileFault, Stream, opened
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
"""Of the formats that are read as a whole; Parquet reads the columns that are asked for."""

_DAMAGE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
"""What the libraries raise for a damaged file; the last for the name of a Parquet column."""


def read_rows(path: str, columns: Sequence[str], split: str) -> Iterator[tuple[str, Row | Unused]]:
    """Every row with its place, in the order of the files' names; memory does not grow with their number.

    Args:
        path: A .jsonl, .json (one array, or JSON Lines), .csv, .parquet or .txt file, also .gz; a glob of such files; or
            a folder written by datasets' `save_to_disk`. Local or any fsspec URL; `~` is expanded.
        columns: What the caller will look at, dotted where nested; the rows may lack the others. Empty: all.
        split: What is read of a saved DatasetDict.

    Yields:
        The place, "name.jsonl:17", counts lines (Parquet and saved data sets: rows) from 1. `Unused` stands for a row
        that is broken while those after it can be read.

    Raises:
        DataError: a file cannot be found, reached or read to its end, or holds no row.
    """
    location = find(path)
    if location.saved is not None:
        folder = location.saved
        name = folder.rpartition("/")[2]
        if any(file.name == "dataset_dict.json" for file in location.files):
            name += f"/{split}"
        yield from _placed(name, without_secrets(folder), saved_rows(folder, columns, split))
    else:
        for file in location.files:
            yield from _placed(file.name, file.shown, _file_rows(file, columns))


def _file_rows(file: File, columns: Sequence[str]) -> Iterator[tuple[int, Row | Unused]]:
    with opened(file) as stream:
        yield from (
            parquet_rows(stream, columns)
            if file.format == "parquet"
            else _READERS[file.format](stream)
        )


def _placed(
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
            f"{shown}:{line + 1}: cannot be read from here on ({shorten(str(error), 300)}). Fetch or make the file again."
        ) from error
    if line == 0:
        raise DataError(
            f"{shown}: holds no row. Fetch or make the file again, or name another one."
        )
