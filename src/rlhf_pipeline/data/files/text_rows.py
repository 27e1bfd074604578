"""Read the formats that are text: JSON Lines, JSON arrays, CSV, and plain text for pretraining."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from rlhf_pipeline.data.files.stream import FileFault, Numbered, Stream, decode, is_utf8
from rlhf_pipeline.data.records import NOT_UTF8, TO_UTF8, Unused
from rlhf_pipeline.data.sources.adapter import Row

MAX_CHARACTERS = 16 * 2**20
"""Limit for a row of JSON or CSV and a line of text. Python's objects take 25 times the bytes."""
_PIECE = 2**20
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\n\r]*")


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
    characters = 0

    def lines() -> Iterator[str]:
        nonlocal characters
        for line in _lines(file):
            characters += len(line)
            if characters > MAX_CHARACTERS:
                raise csv.Error(_too_long())
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        begin, characters = reader.line_num + 1, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) in ("unexpected end of data", _too_long()):
                fix = "Fix: close its quote; double a quote inside a field."
                raise FileFault(begin, f"the row does not end ({error}). {fix}") from None
            yield begin, Unused(f"not CSV ({error})")
        else:
            if fields:
                yield begin, fields


def json_rows(stream: Stream) -> Numbered:
    """Yield the rows of a .json file: an array if it starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else json_lines(stream)


def _array(stream: Stream) -> Numbered:
    """Yield number and object of every element of the array."""
    window = _Window(decode(stream, newline="\n"))
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
        raise FileFault(
            window.line + window.text.count("\n", 0, at),
            f"the JSON array is broken ({_describe_error(error)}). Fix: correct it, or write one "
            "object per line (.jsonl).",
        ) from None


class _Window:
    """The part of a JSON text from the next element on, so that memory is constant."""

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
            element, self.at = self.text[self.at : end], end
            return _object_or_unused(value) if is_utf8(element) else Unused(NOT_UTF8)

    def _grow(self, size: int = 0) -> bool:
        """Read on, and forget what is before `at`; False at the end of the file."""
        piece = self._file.read(max(size, _PIECE))
        if piece:
            self.line += self.text.count("\n", 0, self.at)
            self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)


def json_lines(stream: Stream) -> Numbered:
    """Yield line number and object of every line that is not blank."""
    # Only "\n" ends a line of JSON Lines.
    for number, line in enumerate(_lines(decode(stream, newline="\n")), start=1):
        if len(line) > MAX_CHARACTERS:
            raise FileFault(number, f"{_too_long()}. Fix: write one object per line, or split it.")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line.strip():
                yield number, Unused(_line_fault(line, error))
        else:
            yield number, _object_or_unused(row) if is_utf8(line) else Unused(NOT_UTF8)


def _lines(file: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a file; of a longer one than a row may be, the beginning."""
    return iter(partial(file.readline, MAX_CHARACTERS + 1), "")


def _too_long() -> str:
    return f"the row has more than {MAX_CHARACTERS} characters"


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
        case _:
            return "a number of too many digits"
