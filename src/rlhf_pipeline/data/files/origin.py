"""What decides the rows of data files: their bytes, by the names of the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.data.files.location import File, find, reaching
from rlhf_pipeline.errors import DataError

_CHECKSUMS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""What stores tell of a file's bytes, the best first."""


@dataclass(frozen=True)
class Origin:
    """The files behind a path. Names are those of the files, without what is the same for all of them."""

    files: dict[str, Path]
    """Local files by name; their bytes decide."""

    identities: dict[str, str]
    """Remote files by name, with what the store tells of their bytes; nothing is downloaded for it."""


def origin(path: str) -> Origin:
    """The files at a path.

    Raises:
        DataError: nothing is there, a file is of no known kind, or the store cannot be reached or tells too little.
    """
    files = find(path).files
    return Origin(
        {file.name: file.local for file in files if file.local is not None},
        {file.name: _identity(file) for file in files if file.local is None},
    )


def _identity(file: File) -> str:
    with reaching(file.url):
        info = file.store.info(file.path)
        for name in _CHECKSUMS:
            if info.get(name):
                checksum = str(info[name]).strip('"')  # S3 quotes it in some answers only
                return f"{name} {checksum}, {info['size']} bytes"
        if "url" in info:  # HTTP, whose `ukey` is the same whatever the server sends
            raise DataError(
                f"{file.shown}: the server tells nothing by which a change could be seen. Download the file."
            )
        return str(file.store.ukey(file.path))
