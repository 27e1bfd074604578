"""CSV, and plain text for pre-training."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from rlhf_pipeline.data.files.stream import LONGEST, NOT_UTF8, FileFault, Stream, decoded, is_utf8
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row

_PIECE = 2**20


def text_rows(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """The whole file as one document in the column `text`; a long one in pieces of about a million characters, cut at the
    end of a line. The line is that where the piece begins."""
    file = decoded(stream, newline="\n")
    line = 1
    while piece := file.read(_PIECE):
        piece += file.readline(LONGEST)
        if piece.strip():
            yield line, {"text": piece} if is_utf8(piece) else Unused(NOT_UTF8)
        line += piece.count("\n")


def csv_rows(stream: Stream) -> Iterator[tuple[int, Row | Unused]]:
    """Rows under a header line, by RFC 4180: a quoted field may hold commas, quotes (doubled) and ends of lines. The line
    is that where the row begins."""
    lines = _records(decoded(stream, newline=""))
    first, header = next(lines, (1, []))
    if isinstance(header, Unused) or not is_utf8("".join(header)) or len(set(header)) < len(header):
        raise FileFault(
            first,
            "no header line of distinct column names in UTF-8. Write one, or convert the file.",
        )
    for line, fields in lines:
        if isinstance(fields, Unused):
            yield line, fields
        elif len(fields) != len(header):
            yield (
                line,
                Unused(
                    f"{'fewer' if len(fields) < len(header) else 'more'} fields than the header has"
                ),
            )
        elif not is_utf8("".join(fields)):
            yield line, Unused(NOT_UTF8)
        else:
            yield line, dict(zip(header, fields, strict=True))


def _records(file: io.TextIOWrapper) -> Iterator[tuple[int, list[str] | Unused]]:
    """The fields of every row that is not blank, and the line where it begins."""
    begin = characters = 0
    ended = False

    def lines() -> Iterator[str]:
        nonlocal characters, ended
        while line := file.readline(LONGEST):
            characters += len(line)
            if characters >= LONGEST:
                raise FileFault(
                    begin,
                    f"a row of more than {LONGEST:,} characters. Is a quote in it not closed?",
                )
            yield line
        ended = True

    csv.field_size_limit(LONGEST)  # the module's own is 128 KiB, less than a long answer
    reader = csv.reader(lines(), strict=True)
    while True:
        begin, characters = reader.line_num + 1, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if ended:
                raise FileFault(
                    begin,
                    "the row's quote is never closed. Close it, or double a quote inside a field.",
                ) from None
            yield begin, Unused(f"not CSV ({error})")
        else:
            if fields:
                yield begin, fields
