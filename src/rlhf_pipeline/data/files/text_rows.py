"""Read the formats that are text: JSON Lines, JSON arrays, CSV, and plain text for pretraining."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.data.files.stream import FileFault, Numbered, Stream, decode, is_utf8
from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused
from rlhf_pipeline.data.sources.adapter import Row

MAX_CHARACTERS = 64 * 2**20
"""Limit for a field of CSV and for a line of text. A longer one means a broken file."""
_PIECE = 2**20
_BOM = b"\xef\xbb\xbf"
_NEVER_CLOSED = ("unexpected end of data", "field larger than field limit")
"""Messages of the csv module for a field that reaches the end of the file or `MAX_CHARACTERS`."""


def text_rows(stream: Stream) -> Numbered:
    """Yield the file as one document in column `text`, with the line where the document begins.

    A long file is split at line ends into documents of about a million characters.
    """
    file = decode(stream, newline="\n")
    line = 1
    while piece := file.read(_PIECE):
        piece += file.readline(MAX_CHARACTERS)
        if piece.strip():
            yield line, {"text": piece} if is_utf8(piece) else Unused(NOT_UTF8)
        line += piece.count("\n")


def csv_rows(stream: Stream) -> Numbered:
    """Yield the rows below the header with the line where each begins.

    The format is RFC 4180: a quoted field may contain commas, doubled quotes and line breaks.
    """
    lines = _records(decode(stream, newline=""))
    first, header = next(lines, (1, []))
    if isinstance(header, Unused):
        raise FileFault(first, f"the header line is {header.reason}. Fix: correct it.")
    if fault := _header_fault(header):
        raise FileFault(first, fault)
    for line, fields in lines:
        if isinstance(fields, Unused):
            yield line, fields
        elif len(fields) != len(header):
            relation = "fewer" if len(fields) < len(header) else "more"
            yield line, Unused(f"{relation} fields than the header has")
        elif not is_utf8("".join(fields)):
            yield line, Unused(NOT_UTF8)
        else:
            yield line, dict(zip(header, fields, strict=True))


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


def _records(file: io.TextIOWrapper) -> Iterator[tuple[int, list[str] | Unused]]:
    """Yield the fields of every row that is not blank, with the line where the row begins."""
    csv.field_size_limit(MAX_CHARACTERS)  # the default of 128 KiB is less than a long answer
    reader = csv.reader(file, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error).startswith(_NEVER_CLOSED):
                raise FileFault(
                    begin,
                    f"the quote of the row is never closed ({error}). Fix: close it; double a "
                    "quote inside a field.",
                ) from None
            yield begin, Unused(f"not CSV ({error})")
        else:
            if fields:
                yield begin, fields


def json_rows(stream: Stream) -> Numbered:
    """Yield the rows of a .json file: an array if it starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else json_lines(stream)


def _array(stream: Stream) -> Numbered:
    """Yield number and object of every element of the array, which must fit into memory."""
    try:
        elements = json.load(stream)
    except (ValueError, RecursionError) as error:
        raise FileFault(
            error.lineno if isinstance(error, json.JSONDecodeError) else 1,
            f"the JSON array is broken ({_describe_error(error)}). Fix: correct it, or write one "
            "object per line (.jsonl).",
        ) from None
    yield from enumerate(map(_object_or_unused, elements), start=1)


def json_lines(stream: Stream) -> Numbered:
    """Yield line number and object of every line that is not blank."""
    # Only "\n" ends a line of JSON Lines.
    for number, line in enumerate(decode(stream, newline="\n"), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line.strip():
                yield number, Unused(_line_fault(line, error))
        else:
            yield number, _object_or_unused(row) if is_utf8(line) else Unused(NOT_UTF8)


def _object_or_unused(value: Any) -> Row | Unused:
    if isinstance(value, dict):
        return value
    return Unused(f"a JSON {type(value).__name__}, not an object")


def _line_fault(line: str, error: Exception) -> str:
    """Why a line is not JSON. The reason is the same for all lines with the same fault."""
    if "\0" in line:
        return "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"
    if not is_utf8(line):
        return NOT_UTF8
    return f"not JSON ({_describe_error(error)})"


def _describe_error(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case RecursionError():
            return "nested too deeply"
        case UnicodeDecodeError():
            return NOT_UTF8
        case _:
            return "a number of too many digits"
