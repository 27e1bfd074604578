"""Opening a data file: its bytes, unpacked, whatever the store; and its text, with the bytes that are none kept apart."""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rlhf_pipeline.data.files.location import File, reaching

Stream = io.BufferedReader | gzip.GzipFile
"""What a format's reader reads."""

_BLOCK = 2**20

LONGEST = 64 * 2**20
"""Characters that a line or a row may have. More is no data but a broken file, and would fill the memory."""

NOT_UTF8 = "not UTF-8"


class FileFault(Exception):  # noqa: N818 - a fault of the file, not of the program
    """Raised by a format's reader that cannot read on; the message gives reason and fix."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@contextmanager
def opened(file: File) -> Iterator[Stream]:
    """The file's bytes, unpacked where it is a .gz; able to seek where the format needs it."""
    with ExitStack() as stack:
        stored: io.BufferedReader = stack.enter_context(io.BufferedReader(_Stored(file), _BLOCK))
        if not file.gzipped:
            yield stored
            return
        # Not buffered once more: a block that ends in damage would be lost with the sound lines before it.
        unpacked = stack.enter_context(gzip.GzipFile(fileobj=stored))
        if file.format != "parquet":
            yield unpacked
            return
        temporary = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        shutil.copyfileobj(unpacked, temporary, _BLOCK)
        seekable: io.BufferedReader = stack.enter_context(io.BufferedReader(temporary))
        yield seekable


def decoded(stream: Stream, newline: str) -> io.TextIOWrapper:
    """The stream as text, with or without BOM; `is_utf8` finds the parts that are none."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def is_utf8(text: str) -> bool:
    """Whether a text that `decoded` gave was UTF-8 in the file."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Stored(io.RawIOBase):
    """A file's bytes as they lie in the store; whatever goes wrong on the way is a DataError."""

    def __init__(self, file: File) -> None:
        self._url = file.url
        with reaching(self._url):
            self._file = file.store.open(file.path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with reaching(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with reaching(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
