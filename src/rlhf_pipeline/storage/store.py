"""A store at any fsspec URL: artifacts, kept by content, whole or not at all.

    <url>/objects/<sha256>    a file, named by its content and stored once
    <url>/<pointer>           the manifest of an artifact: name, size and SHA-256 of each file

A push uploads the objects that are missing, reads each one back, and writes the manifest last: one
that was cut off leaves no artifact. A pull compares every digest before the folder gets its name.
"""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from rlhf_pipeline.data.files import explain_store_errors
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError, without_secrets
from rlhf_pipeline.runtime.digests import PIECE, FileEntry, write_pieces
from rlhf_pipeline.runtime.files import put_in_place, require_space
from rlhf_pipeline.runtime.manifest import CURVES, NAME, Manifest

OBJECTS = "objects"
RENAMING = {"file", "local", "sftp", "ssh"}
"""Protocols with a rename that replaces a file at once. Object stores write a whole object."""
SMALL = 2**20  # bytes of the largest JSON file in an outline
_pushing = threading.Lock()  # so that two threads of a run upload a file once


class StoreError(StageError):
    """The store failed. A full disk here is another StageError, or an error of the system."""


explained = partial(explain_store_errors, kind=StoreError)


def open_store(url: str, **options: Any) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path in it. A local path is taken literally."""
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


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Store:
    """Artifacts in a store. Each method raises StoreError if the store fails.

    `options` are those of the fsspec file system, such as keys; none is ever printed.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.name = without_secrets(url)
        self._options = options
        self._damaged: set[str] = set()  # digests of objects that the next push replaces

    @contextmanager
    def _open(self) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
        """The file system and the path in it; inside the block its errors are explained."""
        with explained(self.url):
            store, root = open_store(self.url, **self._options)
            store.invalidate_cache()  # other machines write to it
            yield store, root

    def below(self, path: str) -> "Store":
        """The store of a folder, with objects of its own."""
        store = Store(f"{self.url.rstrip('/')}/{path}", **self._options)
        store._damaged = self._damaged
        return store

    def check(self) -> None:
        """Write and remove a tiny object.

        Raises ConfigError if the URL contains a secret, which messages and MLflow would show.
        """
        if self.name != self.url:
            raise ConfigError(
                f"{self.name}: found a user, a password or a query, expected none. Fix: set them "
                "as `credentials` of the catalog entry, or in the environment"
            )
        with self._open() as (store, root):
            probe = f"{root}/write-test-{secrets.token_hex(4)}"  # another run may do the same
            store.pipe_file(probe, b"may be removed")
            store.rm_file(probe)

    def write(self, name: str, text: str) -> None:
        """Write a text, completely or not at all where the file system can rename a file."""
        with self._open() as (store, root):
            target = f"{root}/{name}"
            if get_protocol(self.url) not in RENAMING:
                store.pipe_file(target, text.encode())
                return
            partial = f"{target}.{secrets.token_hex(4)}.partial"
            try:
                store.pipe_file(partial, text.encode())
                store.mv(partial, target)
            finally:
                with suppress(Exception):  # only a failure leaves it
                    store.rm_file(partial)

    def names(self, pattern: str) -> list[str]:
        """The names that match a pattern such as `stages/*.json`, sorted."""
        folder, depth = pattern.partition("*")[0].rpartition("/")[0], pattern.count("/")
        with self._open() as (store, root):
            # With `maxdepth`, fsspec takes a listing that failed for an empty one.
            found = store.find(f"{root}/{folder}".rstrip("/"))
        names = (path.removeprefix(root).lstrip("/") for path in found)
        return sorted(
            name for name in names if fnmatchcase(name, pattern) and name.count("/") == depth
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Another machine may have removed some of them."""
        for name in names:
            with self._open() as (store, root), suppress(FileNotFoundError):
                store.rm_file(f"{root}/{name}")

    def push(self, artifact: Path, pointer: str) -> int:
        """Upload the missing objects of an artifact, then its manifest; return their bytes."""
        sent = 0
        with _pushing:
            for name, entry in Manifest.read(artifact).files.items():
                with self._open() as (store, root):
                    target = f"{root}/{OBJECTS}/{entry.sha256}"
                    if entry.sha256 in self._damaged or _size(store, target) != entry.size:
                        upload(store, artifact / name, target, entry.sha256)
                        self._damaged.discard(entry.sha256)
                        sent += entry.size
            self.write(pointer, (artifact / NAME).read_text())
        return sent

    def manifest(self, pointer: str, recipe: tuple[str, str] | None = None) -> Manifest | None:
        """The manifest of an artifact; None if the store does not have it.

        Raises ArtifactError if it is damaged, or not of the `recipe`: stage and fingerprint.
        """
        with self._open() as (store, root):
            try:
                text = store.cat_file(f"{root}/{pointer}").decode("utf-8", "replace")
            except FileNotFoundError:
                return None
        with TemporaryDirectory() as temporary:
            (Path(temporary) / NAME).write_text(text)
            try:
                manifest = Manifest.read(Path(temporary))
                whole = all(_is_inside(name, entry) for name, entry in manifest.files.items())
            except ArtifactError:
                whole = False
        if not whole:
            raise ArtifactError(
                f"{self.name}/{pointer} is damaged. Fix: restore or remove it in the store"
            )
        if recipe not in (None, (manifest.stage, manifest.fingerprint)):
            raise ArtifactError(
                f"{self.name}/{pointer}: found the manifest of recipe {manifest.fingerprint[:12]} "
                f"of stage {manifest.stage}, expected another recipe. Fix: remove it in the store"
            )
        return manifest

    def pull(
        self,
        pointer: str,
        folder: Path,
        near: Iterable[Path] = (),
        *,
        outline: bool = False,
        recipe: tuple[str, str] | None = None,
    ) -> Manifest | None:
        """Download an artifact unless the folder contains it; None if the store does not have it.

        A second process waits, by a lock beside the folder. A file that one of the artifacts `near`
        contains is linked. An `outline` is the manifest, the folders, the curves and the small JSON
        files: what an artifact was made from and what it measured. Raises ArtifactError if the
        artifact is damaged in the store, or not of the `recipe`, see `manifest`.
        """
        manifest = self.manifest(pointer, recipe)
        if manifest is None:
            return None
        files = manifest.files
        if outline:
            files = {
                name: entry
                for name, entry in files.items()
                if name == CURVES or (name.endswith(".json") and entry.size <= SMALL)
            }
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_current(folder, manifest, files):
                partial = folder.with_name(f"{folder.name}.partial")
                self._complete(partial, files, near)
                for name in manifest.files:
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                manifest.write(partial)
                put_in_place(partial, folder)
        return manifest

    def _complete(self, folder: Path, files: Mapping[str, FileEntry], near: Iterable[Path]) -> None:
        """Complete a folder, which keeps the files of a download that was cut off."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.rglob("*"), reverse=True):  # files before their folder
            if path.is_file() and path.relative_to(folder).as_posix() not in files:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        local = {
            entry.sha256: artifact / name
            for artifact in near
            for name, entry in Manifest.read(artifact).files.items()
        }
        absent = [
            entry for name, entry in files.items()
            if entry.sha256 not in local and not (folder / name).is_file()
        ]  # fmt: skip
        require_space(folder, sum(entry.size for entry in absent), f"{self.name}: the download")
        for name, entry in files.items():
            path, source = folder / name, local.get(entry.sha256)
            if path.is_file() and entry.matches(path):
                continue
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if source is not None and source.is_file() and entry.matches(source):
                link_or_copy(source, path)
            else:
                self._download(entry, path, name)

    def _download(self, entry: FileEntry, path: Path, name: str) -> None:
        with self._open() as (store, root):
            source = f"{root}/{OBJECTS}/{entry.sha256}"
            size = _size(store, source)
        fetched = None
        try:
            if size == entry.size:
                fetched = write_pieces(path, self._read(source))
        except StoreError as error:
            if "Checksum" not in type(error.__context__).__name__:  # of the store's client
                raise
        if fetched != entry:
            self._damaged.add(entry.sha256)
            path.unlink(missing_ok=True)
            found = {None: "no object", entry.size: "other bytes"}.get(size, f"{size} bytes")
            raise ArtifactError(
                f"{self.name}/{OBJECTS}/{entry.sha256} ({name}): found {found}, expected "
                f"{entry.size} bytes with the SHA-256 in its name. Fix: restore it in the store"
            )

    def _read(self, source: str) -> Iterator[bytes]:
        """The bytes of a file. Only reading is inside `_open`: a full disk here is no fault of the
        store."""
        with self._open() as (store, _):
            yield from _pieces(store, source)


def _size(store: fsspec.AbstractFileSystem, path: str) -> int | None:
    """The size of a file in bytes; None if it does not exist."""
    try:
        return int(store.info(path)["size"])
    except FileNotFoundError:
        return None


def _pieces(store: fsspec.AbstractFileSystem, path: str) -> Iterator[bytes]:
    """The bytes of a file. `get_file` of s3fs fails if a server sends a checksum of the parts."""
    with store.open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _is_inside(name: str, entry: FileEntry) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "/" not in entry.sha256


def _is_current(folder: Path, manifest: Manifest, files: Mapping[str, FileEntry]) -> bool:
    try:
        present = Manifest.read(folder)
    except ArtifactError:
        return False
    sizes = {name: path.stat().st_size for name in files if (path := folder / name).is_file()}
    return present == manifest and sizes == {name: entry.size for name, entry in files.items()}
