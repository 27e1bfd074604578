"""JSON Lines, and JSON files that hold one array; read as a stream either way."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.data.files.stream import LONGEST, NOT_UTF8, FileFault, Stream, decoded, is_utf8
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row

_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_BLANKS = re.compile(r"[ \t\r\n]*")

_loads = json.JSONDecoder().decode
_scan = json.JSONDecoder().raw_decode


def json_rows(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """A .json file: an array where the first character is its bracket, otherwise JSON Lines under another name."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else json_lines(stream)


def json_lines(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Line and object of every line that is not blank."""
    # newline="\n", since only that ends a line of JSON Lines.
    readline = decoded(stream, newline="\n").readline
    number = 0
    while line := readline(LONGEST):
        number += 1
        try:
            row = _loads(line)
        except (ValueError, RecursionError) as error:
            if len(line) == LONGEST:
                while line and not line.endswith("\n"):
                    line = readline(LONGEST)
                yield number, Unused(f"a line of more than {LONGEST:,} characters")
            elif line.strip():
                yield number, Unused(_fault(line, error))
        else:
            yield number, _object(row) if is_utf8(line) else Unused(NOT_UTF8)


def _object(value: Any) -> Row | Unused:
    return (
        value
        if isinstance(value, dict)
        else Unused(f"a JSON {type(value).__name__}, not an object")
    )


def _fault(line: str, error: Exception) -> str:
    """Why a line is no JSON, without what differs from line to line."""
    if "\0" in line:
        return "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"
    if not is_utf8(line):
        return NOT_UTF8
    return f"not JSON ({_told(error)})"


def _told(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case RecursionError():
            return "nested too deeply"
        case _:
            return "a number of too many digits"


# --- one array ------------------------------------------------------------------------------------


def _array(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """The line where each element begins, and the element."""
    window = _Window(decoded(stream, newline="\n"))
    window.take("[")
    separator = "" if window.peek() != "]" else window.take("]")
    while separator != "]":
        yield window.line, _element(window)
        separator = window.take(",]")
    if window.peek():
        raise FileFault(
            window.line, "more follows after the array. Write one array, or one object a line."
        )


def _element(window: _Window) -> Row | Unused:
    while True:
        try:
            value, end = _scan(window.text, window.at)
        except RecursionError as error:
            raise window.fault(window.at, _told(error)) from None
        except ValueError as error:
            # Perhaps the element only goes on behind the window.
            if not window.extend():
                at = error.pos if isinstance(error, json.JSONDecodeError) else window.at
                raise window.fault(at, _told(error)) from None
        else:
            # What looks like 1 may go on as 1.5, or as 1e+5.
            if len(window.text) - end > len("e+") or not window.extend():
                sound = is_utf8(window.text[window.at : end])
                window.advance(end)
                return _object(value) if sound else Unused(NOT_UTF8)


class _Window:
    """The part of a text that is being parsed."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self.text = ""
        self.at = 0
        """Up to here the text is parsed."""
        self.line = 1
        """The line at that place."""

    def extend(self) -> bool:
        """Reads on, as much again as is not yet parsed; False at the file's end, or where that is too much already."""
        rest = self.text[self.at :]
        more = self._file.read(max(_CHUNK, len(rest))) if len(rest) <= LONGEST else ""
        if more:
            self.text, self.at = rest + more, 0
        return bool(more)

    def advance(self, to: int) -> None:
        """Takes the text up to there as parsed."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is not blank; none at the file's end."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            assert blanks is not None, "the pattern matches an empty text"
            self.advance(blanks.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.extend():
                return ""

    def take(self, marks: str) -> str:
        """The next character, which must be one of the marks; goes on to the one behind it."""
        found = self.peek()
        if not found or found not in marks:
            raise self.fault(
                self.at,
                f"{found!r} instead of {' or '.join(marks)}" if found else "the file ends early",
            )
        self.advance(self.at + 1)
        self.peek()
        return found

    def fault(self, at: int, told: str) -> FileFault:
        """What is wrong at a place of the text, and what to do."""
        line = self.line + self.text.count("\n", self.at, at)
        return FileFault(
            line,
            f"the JSON array is broken ({told}). Correct it, or write one object a line (.jsonl).",
        )
