"""Open a data file of any store as bytes, decompressed, or as text."""

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_pipeline.data.files.location import File, explain_store_errors
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row

Stream = io.BufferedReader | gzip.GzipFile
"""What the readers of the formats read from."""
Numbered = Iterator[tuple[int, Row | Unused]]
"""What they yield: rows by their number or line, from 1."""

_BLOCK = 2**20


class FileFault(Exception):  # noqa: N818 - a fault of the file
    """A reader cannot continue. The message states reason and fix."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@contextmanager
def open_stream(file: File) -> Iterator[Stream]:
    """Open a file as bytes, decompressed."""
    stored: io.BufferedReader = io.BufferedReader(_StoredFile(file), _BLOCK)
    with stored:
        if not file.gzipped:
            yield stored
            return
        # Without another buffer, which would lose the valid lines of a block that ends in damage.
        with gzip.GzipFile(fileobj=stored) as unpacked:
            yield unpacked


def decode(stream: Stream, newline: str) -> io.TextIOWrapper:
    """Read the stream as UTF-8 with or without BOM; `is_utf8` detects invalid parts."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def is_utf8(text: str) -> bool:
    """Whether a text is valid; one from `decode` is not if the file was not UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _StoredFile(io.RawIOBase):
    """The bytes of a file as stored. Errors of the store become DataErrors."""

    def __init__(self, file: File) -> None:
        self._url = file.url
        with explain_store_errors(self._url):
            self._file = file.store.open(file.path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with explain_store_errors(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with explain_store_errors(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
