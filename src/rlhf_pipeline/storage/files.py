"""Files in any fsspec file system: upload and read back, errors in one sentence."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.errors import PipelineError, StageError, install, without_secrets
from rlhf_pipeline.runtime.digests import PIECE

CHECK = "check path, permissions, credentials and network, and repeat the command"


class StoreError(StageError):
    """The store failed. A full disk here is another StageError, or an error of the system."""


def size_of(store: fsspec.AbstractFileSystem, path: str) -> int | None:
    """The size of a file in bytes; None if it does not exist."""
    try:
        return int(store.info(path)["size"])
    except FileNotFoundError:
        return None


def pieces(store: fsspec.AbstractFileSystem, path: str) -> Iterator[bytes]:
    """The bytes of a file. Some servers send a wrong checksum for a whole file of several parts, so
    s3fs's `get_file` fails there."""
    with store.open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def open_store(url: str, **options: Any) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path in it. No character of a local path is
    special."""
    if "://" not in url:
        return LocalFileSystem(auto_mkdir=True), str(Path(url).expanduser().absolute())
    store, root = fsspec.url_to_fs(url, **options)
    if isinstance(store, LocalFileSystem):
        store = LocalFileSystem(auto_mkdir=True)
    return store, str(root).rstrip("/")


def upload(store: fsspec.AbstractFileSystem, source: Path, target: str, digest: str) -> None:
    """Upload a file and read it back; raises StageError if the store has other bytes."""
    store.put_file(str(source), target)
    found = hashlib.sha256()
    for piece in pieces(store, target):
        found.update(piece)
    if found.hexdigest() != digest:
        store.rm_file(target)
        raise StageError(
            f"{target}: found SHA-256 {found.hexdigest()[:12]} after the upload, expected "
            f"{digest[:12]}. Fix: check the store, and repeat the command"
        )


@contextmanager
def explained(url: str, fix: str = CHECK) -> Iterator[None]:
    """Turn any error of a store into a StoreError; stores raise exceptions of all types."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        shown = without_secrets(url)
        install_fix = f"install the package of the store; for S3: {install('s3')}"
        details = f": {error}" if shown == url else ""  # it may repeat a secret of the URL
        raise StoreError(
            f"{shown}: found {type(error).__name__}{without_secrets(details)}. Fix: "
            f"{install_fix if isinstance(error, ImportError) else fix}"
        ) from None


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
