"""The identity of data files for the cache: names and bytes, or what a store reports of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.data.files.location import File, explain_store_errors, find_files
from rlhf_pipeline.errors import DataError

_CHECKSUMS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""Fields in which stores report the identity of a file's bytes, best first."""


@dataclass(frozen=True)
class Origin:
    """The files at a path, by name (`File.name`)."""

    files: dict[str, Path]
    """Local files. Their bytes are their identity."""

    identities: dict[str, str]
    """Remote files, with the identity that the store reports. Nothing is downloaded."""


def origin(path: str) -> Origin:
    """The files at a path.

    Raises:
        DataError: no file was found, a file has an unknown format, the store is unreachable, or the
            store reports no identity.
    """
    files = find_files(path).files
    return Origin(
        {file.name: file.local for file in files if file.local is not None},
        {file.name: _identity(file) for file in files if file.local is None},
    )


def _identity(file: File) -> str:
    with explain_store_errors(file.url):
        info = file.store.info(file.path)
        for name in _CHECKSUMS:
            if info.get(name):
                checksum = str(info[name]).strip('"')  # S3 quotes it in some responses only
                return f"{name} {checksum}, {info['size']} bytes"
        if "url" in info:  # HTTP: `ukey` does not depend on the content
            raise DataError(
                f"{file.display_name}: the server sends no ETag, checksum or date, so a changed "
                "file would not be noticed. Fix: download the file, and set `path` to the copy."
            )
        return str(file.store.ukey(file.path))
