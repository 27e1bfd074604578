"""Read JSON Lines as a stream, and JSON arrays whole."""

import json
from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.data.files.stream import NOT_UTF8, FileFault, Stream, decode, is_utf8
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row

_BOM = b"\xef\xbb\xbf"


def json_rows(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Yield the rows of a .json file: an array if it starts with "[", else JSON Lines."""
    head = stream.peek(1).removeprefix(_BOM).lstrip()
    return _array(stream) if head.startswith(b"[") else json_lines(stream)


def _array(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
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


def json_lines(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
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
