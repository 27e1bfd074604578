"""Read JSON Lines and JSON arrays, both as a stream."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.data.files.stream import (
    MAX_CHARACTERS,
    NOT_UTF8,
    FileFault,
    Stream,
    decode,
    is_utf8,
)
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row

_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_NOT_BLANK = re.compile(r"[^ \t\r\n]")

_loads = json.JSONDecoder().decode
_scan = json.JSONDecoder().raw_decode


def json_rows(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Yield line and row of a .json file: an array if it starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else json_lines(stream)


def json_lines(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Yield line number and object of every line that is not blank."""
    # Only "\n" ends a line of JSON Lines.
    readline = decode(stream, newline="\n").readline
    number = 0
    while line := readline(MAX_CHARACTERS):
        number += 1
        try:
            row = _loads(line)
        except (ValueError, RecursionError) as error:
            if len(line) == MAX_CHARACTERS:
                while line and not line.endswith("\n"):
                    line = readline(MAX_CHARACTERS)
                yield number, Unused(f"a line of more than {MAX_CHARACTERS:,} characters")
            elif line.strip():
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
        case _:
            return "a number of too many digits"


# --- one array ------------------------------------------------------------------------------------


def _array(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Yield each element of the array with the line where it begins."""
    window = _Window(decode(stream, newline="\n"))
    window.take("[")
    separator = "" if window.peek() != "]" else window.take("]")
    while separator != "]":
        yield window.line, _element(window)
        separator = window.take(",]")
    if window.peek():
        raise FileFault(
            window.line,
            "found more text after the array. Fix: write one array, or one object per line "
            "(.jsonl).",
        )


def _element(window: _Window) -> Row | Unused:
    while True:
        try:
            value, end = _scan(window.text, window.at)
        except RecursionError as error:
            raise window.fault(window.at, _describe_error(error)) from None
        except ValueError as error:
            # The element may continue beyond the window.
            if not window.extend():
                at = error.pos if isinstance(error, json.JSONDecodeError) else window.at
                raise window.fault(at, _describe_error(error)) from None
        else:
            # A 1 at the end of the window may be the start of 1.5 or 1e+5.
            if len(window.text) - end > len("e+") or not window.extend():
                valid = is_utf8(window.text[window.at : end])
                window.advance(end)
                return _object_or_unused(value) if valid else Unused(NOT_UTF8)


class _Window:
    """A window over the text of a file, from the position of the parser on."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self.text = ""
        self.at = 0
        """Position of the parser in `text`."""
        self.line = 1
        """Line of that position, from 1."""

    def extend(self) -> bool:
        """Read as much text as is unparsed, or a chunk; False at the end or the size limit."""
        rest = self.text[self.at :]
        more = self._file.read(max(_CHUNK, len(rest))) if len(rest) <= MAX_CHARACTERS else ""
        if more:
            self.text, self.at = rest + more, 0
        return bool(more)

    def advance(self, to: int) -> None:
        """Move the parser to position `to`."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            if found := _NOT_BLANK.search(self.text, self.at):
                self.advance(found.start())
                return found[0]
            self.advance(len(self.text))
            if not self.extend():
                return ""

    def take(self, marks: str) -> str:
        """Consume the next character, which must be one of `marks`."""
        found = self.peek()
        if not found or found not in marks:
            raise self.fault(
                self.at,
                f"{found!r} instead of {' or '.join(marks)}" if found else "the file ends early",
            )
        self.advance(self.at + 1)
        self.peek()
        return found

    def fault(self, at: int, reason: str) -> FileFault:
        """The error to raise for a fault at position `at`."""
        line = self.line + self.text.count("\n", self.at, at)
        return FileFault(
            line,
            f"the JSON array is broken ({reason}). Fix: correct it, or write one object per line "
            "(.jsonl).",
        )
