"""Read data files of any format and store as one stream of rows.

The formats are JSON Lines, JSON arrays, CSV, plain text for pretraining, Parquet, and folders
written by `save_to_disk` of the datasets library.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_pipeline.data.files import File, Stream, details_of, explain_store_errors, find_files
from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused, is_utf8
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError, PipelineError, without_secrets

MAX_CHARACTERS = 16 * 2**20
"""Limit for a line of JSON Lines or text and a field of CSV: a longer one is a broken file."""
_PIECE = 2**20
_BATCH_ROWS = 1_000

Numbered = Iterator[tuple[int, Row | Unused]]
"""Rows by their number or line, from 1."""


class _FileFault(Exception):  # noqa: N818 - a fault of the file
    """A reader cannot continue. The arguments are the line, and a message with reason and fix."""


def read_rows(path: str, columns: Sequence[str], split: str) -> Iterator[tuple[str, Row | Unused]]:
    """Yield every row with its place, file after file by name.

    Memory is constant, except for a JSON array. A place is "name.jsonl:17", by line (JSON arrays,
    Parquet and saved data sets: by row) from 1. A broken row is `Unused`; the rows after it are
    read. `columns` are those that the caller reads, dotted if nested, or empty for all; rows may
    lack all others. `split` is that of a saved DatasetDict. Raises DataError if a file is not
    found, not reachable, damaged or empty.
    """
    location = find_files(path)
    if location.saved is not None:
        name = location.saved.rpartition("/")[2]
        if any(file.name == "dataset_dict.json" for file in location.files):
            name += f"/{split}"
        rows = _saved_rows(location.saved, columns, split)
        yield from _with_places(name, location.saved, rows)
    else:
        for file in location.files:
            yield from _with_places(file.name, file.url, _file_rows(file, columns))


def _file_rows(file: File, columns: Sequence[str]) -> Numbered:
    readers: dict[str, Callable[[Stream], Numbered]] = {
        "jsonl": _json_lines,
        "json": _json_rows,
        "csv": _csv_rows,
        "txt": _text_rows,
        "parquet": partial(_parquet_rows, columns=columns),
    }
    with file.open() as stream:
        yield from readers[file.format](stream)


def _with_places(name: str, url: str, rows: Numbered) -> Iterator[tuple[str, Row | Unused]]:
    line = 0
    try:
        for line, row in rows:
            yield f"{name}:{line}", row
    except _FileFault as fault:
        raise DataError("{}:{}: {}".format(without_secrets(url), *fault.args)) from None
    except PipelineError:
        raise
    except Exception as error:  # stores, decompressors and Arrow raise errors of all types
        remote = "check endpoint, credentials and network, or upload the file again."
        raise DataError(
            f"{without_secrets(url)}:{line + 1}: the file cannot be read from here on "
            f"({details_of(url, error)}). Fix: "
            f"{remote if '://' in url else 'download or create the file again.'}"
        ) from error
    if line == 0:
        raise DataError(
            f"{without_secrets(url)}: the file contains no rows. Fix: download or create the file "
            "again, or set `path` to another one."
        )


def _parquet_rows(stream: Stream, columns: Sequence[str]) -> Numbered:
    file = pq.ParquetFile(stream)
    chosen = _requested_columns(columns, file.schema_arrow.names)
    yield from _number_rows(file.iter_batches(_BATCH_ROWS, columns=chosen))


def _saved_rows(folder: str, columns: Sequence[str], split: str) -> Numbered:
    import datasets  # imported late: the import takes a second

    with explain_store_errors(folder):
        saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(
                f"{without_secrets(folder)}: split {split!r} not found. Fix: set the source's "
                f"`split` to one of: {', '.join(saved)}."
            )
        saved = saved[split]
    yield from data_set_rows(saved, _requested_columns(columns, saved.column_names))


def data_set_rows(data_set: Any, columns: list[str]) -> Numbered:
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


def _text_rows(stream: Stream) -> Numbered:
    """The file as one document; a longer one is cut at line ends, after a million characters."""
    file = _decode(stream)
    line = 1
    while piece := file.read(_PIECE):
        piece += file.readline(MAX_CHARACTERS)
        if piece.strip():
            yield line, {"text": piece} if is_utf8(piece) else Unused(NOT_UTF8)
        line += piece.count("\n")


def _csv_rows(stream: Stream) -> Numbered:
    """RFC 4180: a quoted field may contain commas, doubled quotes and line breaks."""
    csv.field_size_limit(MAX_CHARACTERS)  # the default of 128 KiB is less than a long answer
    reader = csv.reader(_decode(stream, newline=""), strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if str(error).startswith(("unexpected end of data", "field larger")):
                fix = "Fix: close its quote; double a quote inside a field."
                raise _FileFault(line, f"the row does not end ({error}). {fix}") from None
            if not header:
                reason = f"the header line is not CSV ({error}). Fix: correct it."
                raise _FileFault(line, reason) from None
            yield line, Unused(f"not CSV ({error})")
            continue
        if fields is None:
            return
        if not header:
            if fault := _header_fault(fields):
                raise _FileFault(line, fault)
            header = fields
        elif fields and len(fields) != len(header):
            relation = "fewer" if len(fields) < len(header) else "more"
            yield line, Unused(f"{relation} fields than the header has")
        elif fields:
            valid = is_utf8("".join(fields))
            yield line, dict(zip(header, fields, strict=True)) if valid else Unused(NOT_UTF8)


def _header_fault(header: list[str]) -> str | None:
    names = "".join(header)
    if "\0" in names:
        return "the header line has NUL bytes. Fix: convert the file from UTF-16 to UTF-8."
    if not is_utf8(names):
        return f"the header line is {NOT_UTF8}. Fix: {TO_UTF8}"
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        return f"the header has column {twice[0]!r} twice. Fix: rename or remove one."
    if len(header) == 1 and (delimiter := next((d for d in ";\t|" if d in names), None)):
        return (
            f"the header is one column, {names!r}: is the delimiter {delimiter!r}? Fix: write the "
            "file with commas, or as .jsonl."
        )
    return None


def _json_rows(stream: Stream) -> Numbered:
    """An array if the file starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _array_rows(stream) if head.startswith(b"[") else _json_lines(stream)


def _array_rows(stream: Stream) -> Numbered:
    text = _decode(stream).read()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _FileFault(
            getattr(error, "lineno", 1),
            f"the JSON array is broken ({_describe_error(error)}). Fix: correct it, or write one "
            "object per line (.jsonl).",
        ) from None
    valid = is_utf8(text)
    for number, value in enumerate(values, start=1):
        yield number, _object(value, "" if valid else json.dumps(value, ensure_ascii=False))


def _json_lines(stream: Stream) -> Numbered:
    file = _decode(stream)
    lines = iter(partial(file.readline, MAX_CHARACTERS + 1), "")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_CHARACTERS:
            fault = f"the row has more than {MAX_CHARACTERS} characters"
            raise _FileFault(number, f"{fault}. Fix: write one object per line, or split it.")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if "\0" in line:
                fault = "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"
            else:
                fault = f"not JSON ({_describe_error(error)})" if is_utf8(line) else NOT_UTF8
            if line.strip():
                yield number, Unused(fault)
        else:
            yield number, _object(row, line)


def _object(value: Any, written: str) -> Row | Unused:
    """A value of JSON as a row, if it is an object of valid text."""
    if not is_utf8(written):
        return Unused(NOT_UTF8)
    if not isinstance(value, dict):
        return Unused(f"a JSON {type(value).__name__}, not an object")
    return value


def _describe_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    deep = isinstance(error, RecursionError)
    return "nested too deeply" if deep else "a number of too many digits"


def _decode(stream: Stream, newline: str = "\n") -> io.TextIOWrapper:
    """Read the stream as UTF-8 with or without BOM; `is_utf8` detects invalid parts.

    Only "\\n" ends a line, except in CSV, whose reader gets all line ends (`newline=""`).
    """
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
