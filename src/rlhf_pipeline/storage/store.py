"""A store at any fsspec URL: folders of files, kept by content, whole or not at all.

    <url>/objects/<sha256>    a file, named by its content and stored once
    <url>/<pointer>           JSON that lists a folder: name, size and SHA-256 of each file

A push uploads the objects that are missing, reads each one back, and writes the pointer last. So a
push that was cut off leaves no folder, and its repetition uploads only the rest. A pull compares
the digest of every file before the folder gets its name.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.errors import (
    ArtifactError,
    ConfigError,
    PipelineError,
    StageError,
    without_secrets,
)
from rlhf_pipeline.runtime.digests import PIECE, FileEntry, write_pieces
from rlhf_pipeline.runtime.files import require_space, write_atomically
from rlhf_pipeline.runtime.manifest import CURVES, NAME, Manifest

OBJECTS = "objects"
PROBE = "write-test"
SMALL = 2**20
"""Bytes of the largest JSON file in an outline."""
CHECK = "check path, permissions, credentials and network, and repeat the command"
INSTALL = (
    "install the package of the store; for S3, in the project folder: .venv/bin/pip install "
    "--constraint constraints.txt --editable '.[s3]'"
)


class Store:
    """Folders in a store, and single texts.

    Each method raises StageError, with URL, reason and fix, if the store fails.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """`options` are those of the fsspec file system, such as keys; none is ever printed."""
        self.url = url
        self.name = without_secrets(url)
        self._options = options
        self._damaged: set[str] = set()
        """Digests whose object has other bytes. The next push replaces it."""

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        return open_store(self.url, **self._options)

    @contextmanager
    def _open(self) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
        """The file system and the path in it; inside the block its errors are explained."""
        with explained(self.url):
            store, root = self._place
            store.invalidate_cache()  # other machines write to it
            yield store, root

    def below(self, path: str) -> "Store":
        """The store of a folder, with objects of its own."""
        store = Store(f"{self.url.rstrip('/')}/{path}", **self._options)
        store._damaged = self._damaged
        return store

    def check(self) -> None:
        """Write, read and remove a tiny object.

        Raises ConfigError if the URL contains a secret, which messages and MLflow would show.
        """
        if self.name != self.url:
            raise ConfigError(
                f"{self.name}: found a user, a password or a query, expected none. Fix: set them "
                "as `credentials` of the catalog entry, or in the environment"
            )
        with self._open() as (store, root):
            store.pipe_file(f"{root}/{PROBE}", PROBE.encode())
            found = store.cat_file(f"{root}/{PROBE}")
            store.rm_file(f"{root}/{PROBE}")
        if found != PROBE.encode():
            raise StageError(f"{self.name}: found other bytes after a write. Fix: {CHECK}")

    def read(self, name: str) -> str | None:
        """A text of the store, such as a pointer; None if there is none."""
        with self._open() as (store, root):
            try:
                return str(store.cat_file(f"{root}/{name}").decode("utf-8", "replace"))
            except FileNotFoundError:
                return None

    def write(self, name: str, text: str) -> None:
        """Write a text."""
        with self._open() as (store, root):
            store.pipe_file(f"{root}/{name}", text.encode())

    def names(self, pattern: str) -> list[str]:
        """The names that match a pattern such as `stages/*.json`, sorted."""
        folder = pattern.partition("*")[0].rpartition("/")[0]
        with self._open() as (store, root):
            found = store.find(f"{root}/{folder}".rstrip("/"))
        names = (path.removeprefix(root).lstrip("/") for path in found)
        depth = pattern.count("/")
        return sorted(
            name for name in names if fnmatchcase(name, pattern) and name.count("/") == depth
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            with self._open() as (store, root):
                store.rm_file(f"{root}/{name}")

    def push(
        self, folder: Path, files: Mapping[str, FileEntry], pointer: str, text: str | None = None
    ) -> int:
        """Upload the objects of a folder that are missing, then its pointer; return their bytes.

        `text` is the text of the pointer, by default the files as JSON.
        """
        sent = 0
        for name, entry in files.items():
            with self._open() as (store, root):
                target = f"{root}/{OBJECTS}/{entry.sha256}"
                if entry.sha256 in self._damaged or _size(store, target) != entry.size:
                    upload(store, folder / name, target, entry.sha256)
                    self._damaged.discard(entry.sha256)
                    sent += entry.size
        entries = {name: asdict(entry) for name, entry in sorted(files.items())}
        self.write(pointer, json.dumps(entries, indent=2) if text is None else text)
        return sent

    def pull(
        self,
        files: Mapping[str, FileEntry],
        folder: Path,
        near: Iterable[Path] = (),
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Download files into a folder, which gets its name when all of them are verified.

        A file that one of the artifacts `near` contains is linked instead. The files of a pull that
        was cut off are kept. `texts` are further files. Raises ArtifactError if an object is
        missing or has other bytes; the message names it.
        """
        partial = folder.with_name(f"{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        for path in sorted(partial.rglob("*"), reverse=True):  # files before their folder
            if path.is_file() and path.relative_to(partial).as_posix() not in files:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        local = {
            entry.sha256: artifact / name
            for artifact in near
            for name, entry in Manifest.read(artifact).files.items()
        }
        needed = sum(
            entry.size for name, entry in files.items()
            if entry.sha256 not in local and not (partial / name).is_file()
        )  # fmt: skip
        require_space(partial, needed, f"{self.name}: the download")
        for name, entry in files.items():
            path, source = partial / name, local.get(entry.sha256)
            if path.is_file() and entry.matches(path):
                continue
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if source is not None and source.is_file() and entry.matches(source):
                link_or_copy(source, path)
            else:
                self._download(entry, path, name)
        for name, text in texts.items():
            write_atomically(partial / name, text)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def entries(self, pointer: str) -> dict[str, FileEntry]:
        """The files of a folder that was pushed without a text. Raises ArtifactError if damaged."""
        try:
            fields = json.loads(self.read(pointer) or "")
            return _safe({name: FileEntry(**entry) for name, entry in fields.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{self.name}/{pointer} is damaged ({error})") from error

    def pull_artifact(
        self, pointer: str, folder: Path, near: Iterable[Path] = (), *, outline: bool = False
    ) -> Manifest | None:
        """Download an artifact unless the folder contains it; None if the store does not have it.

        An `outline` is its manifest, its folders, its curves and its small JSON files: what it was
        made from and what it measured. Raises ArtifactError if the artifact is damaged there.
        """
        text = self.read(pointer)
        if text is None:
            return None
        with TemporaryDirectory() as temporary:
            (Path(temporary) / NAME).write_text(text)
            try:
                manifest = Manifest.read(Path(temporary))
                files = _safe(manifest.files)
            except (ArtifactError, ValueError):
                raise ArtifactError(
                    f"{self.name}/{pointer} is damaged. Fix: restore or remove it in the store"
                ) from None
        if outline:
            files = {
                name: entry for name, entry in files.items()
                if name == CURVES or (name.endswith(".json") and entry.size <= SMALL)
            }  # fmt: skip
        present = folder / NAME
        sizes = {name: path.stat().st_size for name in files if (path := folder / name).is_file()}
        if (
            not present.is_file()
            or present.read_text() != text
            or sizes != {name: entry.size for name, entry in files.items()}
        ):
            self.pull(files, folder, near, {NAME: text})
        for name in manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        return manifest

    def _download(self, entry: FileEntry, path: Path, name: str) -> None:
        with self._open() as (store, root):
            source = f"{root}/{OBJECTS}/{entry.sha256}"
            size = _size(store, source)
            right = size == entry.size and write_pieces(path, _pieces(store, source)) == entry
        if not right:
            self._damaged.add(entry.sha256)
            path.unlink(missing_ok=True)
            found = {None: "no object", entry.size: "other bytes"}.get(size, f"{size} bytes")
            raise ArtifactError(
                f"{self.name}/{OBJECTS}/{entry.sha256} ({name}): found {found}, expected "
                f"{entry.size} bytes with the SHA-256 in its name. Fix: restore it in the store"
            )


def _safe(files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """The files. Raises ValueError if a name or digest would reach another folder."""
    for name, entry in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"found the name {name!r}, expected one in the folder")
        if "/" in entry.sha256:
            raise ValueError(f"found the digest {entry.sha256!r}")
    return files


def _size(store: fsspec.AbstractFileSystem, path: str) -> int | None:
    """The size of a file in bytes; None if it does not exist."""
    try:
        return int(store.info(path)["size"])
    except FileNotFoundError:
        return None


def _pieces(store: fsspec.AbstractFileSystem, path: str) -> Iterator[bytes]:
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
    for piece in _pieces(store, target):
        found.update(piece)
    if found.hexdigest() != digest:
        store.rm_file(target)
        raise StageError(
            f"{target}: found SHA-256 {found.hexdigest()[:12]} after the upload, expected "
            f"{digest[:12]}. Fix: check the store, and repeat the command"
        )


@contextmanager
def explained(url: str, fix: str = CHECK) -> Iterator[None]:
    """Turn any error of a store into a StageError; stores raise exceptions of all types."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        shown = without_secrets(url)
        details = f": {error}" if shown == url else ""  # it may repeat a secret of the URL
        raise StageError(
            f"{shown}: found {type(error).__name__}{without_secrets(details)}. Fix: "
            f"{INSTALL if isinstance(error, ImportError) else fix}"
        ) from None


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
