"""Find, identify and open data files: local, or in any store that fsspec supports."""

import gzip
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Literal, cast, get_args

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.errors import DataError, PipelineError, install, without_secrets

Format = Literal["jsonl", "json", "csv", "parquet", "txt"]

_CHECKSUMS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified")
"""Fields in which stores report the identity of a file's bytes, best first."""
_QUERY_VARIABLE = re.compile(r"(https?://[^?]*\?)\$(\w+)")
_BLOCK = 2**20

Stream = io.BufferedReader | gzip.GzipFile
"""What the readers of the formats read from."""


@dataclass(frozen=True)
class File:
    """One file, not yet opened."""

    name: str
    """Unique among the files of a path, whatever the folder that contains them."""
    path: str
    store: fsspec.AbstractFileSystem

    @property
    def local(self) -> Path | None:
        return Path(self.path) if isinstance(self.store, LocalFileSystem) else None

    @property
    def url(self) -> str:
        return self.path if self.local else str(self.store.unstrip_protocol(self.path))

    @property
    def display_name(self) -> str:
        """The URL without secrets, for messages."""
        return without_secrets(self.url)

    @property
    def format(self) -> Format:
        """The format, by suffix; raises DataError for an unknown one."""
        suffix = PurePosixPath(self.name.lower().removesuffix(".gz")).suffix.removeprefix(".")
        if suffix not in get_args(Format):
            known = ", ".join(f".{format}" for format in get_args(Format))
            raise DataError(
                f"{self.display_name}: unknown file format; expected {known}, each also with .gz. "
                "Fix: convert or rename the file, or select the data files with a glob."
            )
        return cast(Format, suffix)


@dataclass(frozen=True)
class Location:
    """The files at a path, by name."""

    files: tuple[File, ...]
    saved: str | None = None
    """Their folder, if `save_to_disk` of the datasets library wrote it."""


@dataclass(frozen=True)
class Origin:
    """Local files, and the identities that stores report of remote ones, by `File.name`."""

    files: dict[str, Path]
    identities: dict[str, str]


def find_files(path: str) -> Location:
    """Find the files at a local path or fsspec URL: a file, a glob, or a saved data set. Raises
    DataError if no file was found, one has an unknown format, or the store is unreachable."""
    with explain_store_errors(path):
        store, root = fsspec.url_to_fs(_with_query(path))
        store.invalidate_cache()  # files may have changed since an earlier listing
        try:
            infos = {root: store.info(root)}
        except FileNotFoundError:
            infos = store.glob(root, detail=True)
            if not infos:
                raise
        if root in infos and infos[root]["type"] == "directory":
            return _saved_location(path, store, root)
        paths = [found for found, info in infos.items() if info["type"] == "file"]
        if not paths:
            raise FileNotFoundError("the path exists, but is not a file")
    files = tuple(File(name, found, store) for name, found in _named(paths))
    for file in files:
        _ = file.format  # raises before any file is read
    return Location(files)


def origin(path: str) -> Origin:
    """The files at a path; raises like `find_files`, and if a store tells no identity of a file."""
    files = find_files(path).files
    return Origin(
        {file.name: file.local for file in files if file.local is not None},
        {file.name: _identity(file) for file in files if file.local is None},
    )


@contextmanager
def open_stream(file: File) -> Iterator[Stream]:
    """Open a file as decompressed bytes."""
    stored: io.BufferedReader = io.BufferedReader(_StoredFile(file), _BLOCK)
    with stored:
        if not file.name.lower().endswith(".gz"):
            yield stored
            return
        # Without another buffer, which would lose the valid lines of a block that ends in damage.
        with gzip.GzipFile(fileobj=stored) as unpacked:
            yield unpacked


@contextmanager
def explain_store_errors(url: str, kind: type[PipelineError] = DataError) -> Iterator[None]:
    """Turn any error of the store, whatever its type, into one of this kind with URL and fix."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        shown = without_secrets(url)
        match error:
            case ImportError():
                reason = "the store needs a package that is not installed"
                fix = f"for S3: {install('s3')}"
            case FileNotFoundError():
                reason = "not found"
                fix = "correct the path; a relative one starts at the current folder."
            case PermissionError():
                reason = "access denied"
                fix = "correct the permissions of the file, or the credentials of the store."
            case _:
                reason = "cannot be read"
                fix = "check the path; for a remote store also endpoint, credentials and network."
        # fsspec's HTTP store reports every error as a missing file; the cause is the real error.
        cause = error.__cause__ or error
        said = shorten(without_secrets(str(cause)), 300)
        details = type(cause).__name__
        if said and shown == url:  # else the store's message may repeat the secret of the URL
            details += f": {said}"
        raise kind(f"{shown}: {reason} ({details}). Fix: {fix}") from None


def _with_query(path: str) -> str:
    if (found := _QUERY_VARIABLE.fullmatch(path)) is None:
        return path
    start, name = found.groups()
    if name in os.environ:
        return f"{start}{os.environ[name].removeprefix('?')}"
    raise DataError(
        f"{path}: environment variable {name} is not set. Fix: export it with the query of the URL."
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


def _saved_location(path: str, store: fsspec.AbstractFileSystem, root: str) -> Location:
    if not any(store.isfile(f"{root}/{marker}") for marker in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{path}: expected files, or a folder written by `save_to_disk`; "
            "found another folder. Fix: select the files in the folder, for example "
            f"{path.rstrip('/')}/*.parquet."
        )
    paths = sorted(store.find(root))
    return Location(
        tuple(File(found.removeprefix(f"{root}/"), found, store) for found in paths),
        root if isinstance(store, LocalFileSystem) else store.unstrip_protocol(root),
    )


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Paths by name: the shortest endings that are distinct, which are base names in most cases."""
    parts = [
        path.partition("?")[0].split("/") if "://" in path else path.split("/") for path in paths
    ]
    for depth in count(1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len({*names}) == len(names):
            break
    return sorted(zip(names, paths, strict=True))


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
