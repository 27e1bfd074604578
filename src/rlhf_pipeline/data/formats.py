"""Read data files of any format and store as one stream of rows."""

import csv
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from textwrap import shorten
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_pipeline.data.files import (
    File,
    Format,
    Stream,
    explain_store_errors,
    find_files,
    open_stream,
)
from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused, is_utf8
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError, without_secrets

MAX_CHARACTERS = 16 * 2**20
"""Limit for a row of JSON or CSV and a line of text."""
_PIECE = 2**20
_BATCH_ROWS = 1_000
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\n\r]*")
_DAMAGE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
"""Exceptions for a damaged file; UnicodeDecodeError stems from the name of a Parquet column."""

Numbered = Iterator[tuple[int, Row | Unused]]
"""Rows by their number or line, from 1."""


def read_rows(path: str, columns: Sequence[str], split: str) -> Iterator[tuple[str, Row | Unused]]:
    """Yield every row with its place, file after file by name, in constant memory.

    A place is "name.jsonl:17": the line, or in JSON arrays, Parquet and saved data sets the row,
    from 1. A broken row is `Unused`. `columns` are those that the caller reads, dotted if nested,
    or empty for all; rows may lack all others. `split` is that of a saved DatasetDict. Raises
    DataError if a file is not found, not reachable, damaged or empty.
    """
    location = find_files(path)
    if (folder := location.saved) is not None:
        has_splits = any(file.name == "dataset_dict.json" for file in location.files)
        name = folder.rpartition("/")[2] + (f"/{split}" if has_splits else "")
        yield from _with_places(name, without_secrets(folder), _saved_rows(folder, columns, split))
        return
    for file in location.files:
        yield from _with_places(file.name, file.display_name, _file_rows(file, columns))


def _file_rows(file: File, columns: Sequence[str]) -> Numbered:
    readers: dict[Format, Callable[[Stream], Numbered]] = {
        "jsonl": _json_lines,
        "json": _json_rows,
        "csv": _csv_rows,
        "txt": _text_rows,
        "parquet": partial(_parquet_rows, columns=columns),
    }
    with open_stream(file) as stream:
        yield from readers[file.format](stream)


def _with_places(name: str, shown: str, rows: Numbered) -> Iterator[tuple[str, Row | Unused]]:
    line = 0
    try:
        for line, row in rows:
            yield f"{name}:{line}", row
    except _FileFault as fault:
        raise DataError("{}:{}: {}".format(shown, *fault.args)) from None
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
                f"{folder}: split {split!r} not found. Fix: set the source's "
                f"`split` to one of: {', '.join(saved)}."
            )
        saved = saved[split]
    yield from data_set_rows(saved, _requested_columns(columns, saved.column_names))


def data_set_rows(data_set: Any, columns: list[str]) -> Numbered:
    """Yield these columns of every row of a data set, numbered from 1."""
    chosen = data_set.select_columns(columns).with_format("arrow")
    yield from _number_rows(chosen.iter(_BATCH_ROWS))


def _requested_columns(columns: Sequence[str], names: list[str]) -> list[str]:
    """The requested columns; all if one is missing, since the message about it lists them."""
    starts = {column: column.partition(".")[0] for column in columns}
    if not columns or any(not {column, start} & {*names} for column, start in starts.items()):
        return names
    return [name for name in names if name in {*starts, *starts.values()}]


def _number_rows(batches: Iterable[pa.RecordBatch | pa.Table]) -> Numbered:
    def rows(batch: pa.RecordBatch | pa.Table) -> list[Row | Unused]:
        try:
            batch.validate(full=True)  # converting a damaged batch would crash the process
            return batch.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError):
            if batch.num_rows == 1:
                return [Unused("a value that is not valid, such as text that is not UTF-8")]
            return [row for index in range(batch.num_rows) for row in rows(batch.slice(index, 1))]

    return enumerate(chain.from_iterable(map(rows, batches)), start=1)


def _text_rows(stream: Stream) -> Numbered:
    """The file as one document; a longer one is cut at line ends, after a million characters."""
    file = _decode(stream, newline="\n")
    line = 1
    while piece := file.read(_PIECE):
        piece += file.readline(MAX_CHARACTERS)
        if piece.strip():
            yield line, {"text": piece} if is_utf8(piece) else Unused(NOT_UTF8)
        line += piece.count("\n")


def _csv_rows(stream: Stream) -> Numbered:
    """RFC 4180; a row has the number of the line where it begins, and blank lines are no rows."""
    csv.field_size_limit(MAX_CHARACTERS)  # the default of 128 KiB is less than a long answer
    characters, header = 0, list[str]()

    def lines() -> Iterator[str]:
        nonlocal characters
        for line in _lines(_decode(stream, newline="")):
            characters += len(line)
            if characters > MAX_CHARACTERS:
                raise csv.Error(_too_long())
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        begin, characters, fault = reader.line_num + 1, 0, None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) in ("unexpected end of data", _too_long()):
                fix = "Fix: close its quote; double a quote inside a field."
                raise _FileFault(begin, f"the row does not end ({error}). {fix}") from None
            fields, fault = [], f"not CSV ({error})"
        if not fields and not fault:
            continue
        if not header:
            unread = f"the header line is {fault}. Fix: correct it."
            if message := unread if fault else _header_fault(fields):
                raise _FileFault(begin, message)
            header = fields
            continue
        if not fault and len(fields) != len(header):
            fault = f"{'fewer' if len(fields) < len(header) else 'more'} fields than the header has"
        elif not is_utf8("".join(fields)):
            fault = NOT_UTF8
        yield begin, Unused(fault) if fault else dict(zip(header, fields, strict=True))


def _header_fault(header: list[str]) -> str | None:
    names, found = "".join(header), Counter(header)
    if "\0" in names:
        return "the header line has NUL bytes. Fix: convert the file from UTF-16 to UTF-8."
    if not is_utf8(names):
        return f"the header line is {NOT_UTF8}. Fix: {TO_UTF8}"
    if found[""] > 1:
        return f"{found['']} columns of the header have no name. Fix: name or remove them."
    if twice := [name for name, count in found.items() if count > 1]:
        return f"the header has column {twice[0]!r} twice. Fix: rename or remove one."
    if len(header) == 1 and (delimiter := next((d for d in ";\t|" if d in names), None)):
        return (
            f"the header is one column, {names!r}: is the delimiter {delimiter!r}? Fix: write the "
            "file with commas, or as .jsonl."
        )
    return None


def _json_rows(stream: Stream) -> Numbered:
    """An array if the file starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else _json_lines(stream)


def _array(stream: Stream) -> Numbered:
    window = _Window(_decode(stream, newline="\n"))
    try:
        window.next_mark()
        window.at += 1
        number, more = 0, window.next_mark() != "]"
        while more:
            number += 1
            yield number, window.next_element()
            mark = window.next_mark()
            if mark not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", window.text, window.at)
            more = mark == ","
            window.at += more
        window.at += 1
        if window.next_mark():
            raise json.JSONDecodeError("Extra data", window.text, window.at)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else window.at
        raise _FileFault(
            window.line + window.text.count("\n", 0, at),
            f"the JSON array is broken ({_describe_error(error)}). Fix: correct it, or write one "
            "object per line (.jsonl).",
        ) from None


def _json_lines(stream: Stream) -> Numbered:
    # Only "\n" ends a line of JSON Lines.
    for number, line in enumerate(_lines(_decode(stream, newline="\n")), start=1):
        if len(line) > MAX_CHARACTERS:
            raise _FileFault(number, f"{_too_long()}. Fix: write one object per line, or split it.")
        try:
            yield number, _object(json.loads(line), line)
        except (ValueError, RecursionError) as error:
            fault = f"not JSON ({_describe_error(error)})"
            if "\0" in line:
                fault = "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"
            elif not is_utf8(line):
                fault = NOT_UTF8
            if line.strip():
                yield number, Unused(fault)


def _lines(file: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a file; of a longer one than a row may be, the beginning."""
    return iter(partial(file.readline, MAX_CHARACTERS + 1), "")


def _too_long() -> str:
    return f"the row has more than {MAX_CHARACTERS} characters"


def _object(value: Any, written: str) -> Row | Unused:
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


def _decode(stream: Stream, newline: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


class _FileFault(Exception):  # noqa: N818 - a fault of the file
    """A reader cannot continue at this line, for this reason with its fix."""


class _Window:
    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self.text, self.at = "", 0
        self.line = 1
        """Line of the file in which `text` begins."""

    def next_mark(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or not self._grow():
                return self.text[self.at : self.at + 1]

    def next_element(self) -> Row | Unused:
        """Raises JSONDecodeError, or another ValueError or RecursionError, at what is no JSON."""
        self.next_mark()
        while True:
            size = len(self.text) - self.at
            more = min(size, MAX_CHARACTERS - size)
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:  # broken, or cut
                if size > MAX_CHARACTERS:
                    error.msg += f", or {_too_long()}"
                if size > MAX_CHARACTERS or not self._grow(more):
                    raise
                continue
            if end + len("e+") >= len(self.text) and self._grow(more):
                continue  # a number may be cut
            begin, self.at = self.at, end
            return _object(value, self.text[begin:end])

    def _grow(self, size: int = 0) -> bool:
        """Read on, and forget what is before `at`; False at the end of the file."""
        piece = self._file.read(max(size, _PIECE))
        if piece:
            self.line += self.text.count("\n", 0, self.at)
            self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)
