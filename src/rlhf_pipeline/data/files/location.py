"""Where data files lie: what a path names, local or in any store that fsspec knows, and why it cannot be reached.

Stores take their settings from the environment, so that no secret is part of a configuration. S3:
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` (or any other of botocore's ways), and for a store that is not Amazon's
`AWS_ENDPOINT_URL`. Any store: `FSSPEC_<PROTOCOL>_<OPTION>`, such as `FSSPEC_S3_ANON=true`
(https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration). The query of a signed URL: `?$NAME` stands
for the value of NAME.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any, Literal, cast, get_args

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.errors import DataError, PipelineError
from rlhf_pipeline.redaction import without_secrets

Format = Literal["jsonl", "json", "csv", "parquet", "txt"]

_QUERY_VARIABLE = re.compile(r"(https?://[^?]*\?)\$(\w+)")


@dataclass(frozen=True)
class File:
    """One file, not yet opened."""

    name: str
    """Its own among the files of a path; does not tell where they lie."""

    path: str
    """In its store."""

    store: fsspec.AbstractFileSystem

    @property
    def local(self) -> Path | None:
        """Where it lies on this machine; None for a remote file."""
        return Path(self.path) if isinstance(self.store, LocalFileSystem) else None

    @property
    def url(self) -> str:
        """Where it lies; a plain path for a local file."""
        return self.path if self.local else str(self.store.unstrip_protocol(self.path))

    @property
    def shown(self) -> str:
        """How messages call it."""
        return without_secrets(self.url)

    @property
    def gzipped(self) -> bool:
        """Whether its bytes are to be unpacked."""
        return self.name.lower().endswith(".gz")

    @property
    def format(self) -> Format:
        """By its suffix; DataError where that is not known."""
        suffix = PurePosixPath(self.name.lower().removesuffix(".gz")).suffix.removeprefix(".")
        if suffix not in get_args(Format):
            known = ", ".join(f".{format}" for format in get_args(Format))
            raise DataError(
                f"{self.shown}: no known kind of data file. Known are {known}, each also with .gz; "
                "convert or rename it, or name the files by a glob."
            )
        return cast(Format, suffix)


@dataclass(frozen=True)
class Location:
    """What a path names."""

    files: tuple[File, ...]
    """In the order of their names, which is that of reading."""

    saved: str | None = None
    """The folder, where it is one that datasets' `save_to_disk` wrote; `files` are then all that is in it."""


def find(path: str) -> Location:
    """The files at a path: a file, a glob of files, or a folder written by `save_to_disk`; local or any fsspec URL.

    Raises:
        DataError: nothing is there, a file is of no known kind, or the store cannot be reached.
    """
    with reaching(path):
        store, root = fsspec.url_to_fs(_signed(path))
        store.invalidate_cache()  # of listings that an earlier call left; files may have changed since
        infos = _infos(store, root)
        if root in infos and infos[root]["type"] == "directory":
            return _saved(path, store, root)
        paths = [found for found, info in infos.items() if info["type"] == "file"]
        if not paths:
            raise FileNotFoundError("there is something, but no file")
    files = tuple(
        sorted(
            (File(*named, store) for named in zip(_names(paths), paths, strict=True)),
            key=attrgetter("name"),
        )
    )
    for file in files:
        _ = file.format  # before any of them is read
    return Location(files)


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turns a store's failures into a DataError that names the file, the reason and the fix.

    Every store fails in its own way, and not only with OSErrors; so nothing but reading from a store belongs inside.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        shown = without_secrets(url)
        # HTTP calls everything a missing file, and only its cause tells a refused connection.
        cause = error.__cause__ or error
        told = (
            shorten(str(cause), 300) if shown == url else ""
        )  # the store's words may repeat the secret
        raise DataError(f"{shown}: {_reason(error, told or type(cause).__name__)}") from None


def _signed(path: str) -> str:
    """The path with the query that `?$NAME` stands for."""
    found = _QUERY_VARIABLE.fullmatch(path)
    if found is None:
        return path
    if found[2] not in os.environ:
        raise DataError(
            f"{without_secrets(path)}: the environment has no {found[2]}; export it with the URL's query"
        )
    return found[1] + os.environ[found[2]].removeprefix("?")


def _reason(error: Exception, told: str) -> str:
    match error:
        case ImportError():
            install = ".venv/bin/pip install --constraint constraints.txt --editable '.[s3]'"
            return f"its store needs a package that is not installed ({told}). For S3, in the project's folder: {install}"
        case FileNotFoundError():
            return f"not found ({told}). Correct the source's `path`; a relative one starts at the current folder."
        case PermissionError():
            return f"access denied ({told}). Correct the file's permissions, or the store's credentials."
        case _:
            return f"cannot be read ({told}). Check the path; for a remote store its endpoint, credentials and network."


def _infos(store: fsspec.AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """What the store tells of the path; of the files that it matches, where it is the glob and not the name of a file."""
    try:
        return {path: store.info(path)}
    except FileNotFoundError:
        found = store.glob(path, detail=True)
        if not found:
            raise
        return found


def _saved(path: str, store: fsspec.AbstractFileSystem, root: str) -> Location:
    if not any(store.isfile(f"{root}/{marker}") for marker in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{without_secrets(path)}: a folder that `save_to_disk` did not write. "
            f"Name the files in it, for example {without_secrets(path).rstrip('/')}/*.parquet."
        )
    paths = sorted(store.find(root))
    return Location(
        tuple(File(found.removeprefix(f"{root}/"), found, store) for found in paths),
        root if isinstance(store, LocalFileSystem) else store.unstrip_protocol(root),
    )


def _names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart: base names, mostly."""
    parts = [
        path.partition("?")[0].split("/") if "://" in path else path.split("/") for path in paths
    ]
    depth = next(
        depth for depth in count(1) if len({tuple(part[-depth:]) for part in parts}) == len(parts)
    )
    return ["/".join(part[-depth:]) for part in parts]
