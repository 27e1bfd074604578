"""SHA-256 of files, computed while they are read or written, with a heartbeat for every piece."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.runtime import heartbeat

PIECE = 2**24
"""Bytes that are read or written at a time."""

_known: dict[tuple[int, int, int, int], str] = {}
"""Digests of the large files that this process has read or written, by `_state`."""


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    size: int
    """Bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """The entry of a file.

        A file of at least one `PIECE` that this process has read or written is not read again,
        unless it has changed since. Smaller files may change twice within a tick of the clock.
        """
        found = _known.get(_state(path)) or _remember(path, file_digest(path))
        return cls(path.stat().st_size, found)

    def matches(self, path: Path) -> bool:
        """Whether a file has this size and these bytes. The file is always read."""
        return path.stat().st_size == self.size and file_digest(path) == self.sha256


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. The file is always read."""
    return digest_of(read_pieces(path))


def digest_of(pieces: Iterable[bytes]) -> str:
    """SHA-256 of bytes that come in pieces, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        heartbeat.tick()
    return digest.hexdigest()


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file; return its entry, computed from the given bytes without reading the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            heartbeat.tick()
    return FileEntry(path.stat().st_size, _remember(path, digest.hexdigest()))


def read_pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, at most `PIECE` of them at a time."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _remember(path: Path, digest: str) -> str:
    if path.stat().st_size >= PIECE:
        _known[_state(path)] = digest
    return digest


def _state(path: Path) -> tuple[int, int, int, int]:
    """What changes when a file is replaced or written to, but not when it is renamed."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
