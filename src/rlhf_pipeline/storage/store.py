"""A store at any fsspec URL: artifacts, kept by content, whole or not at all.

    <url>/objects/<sha256>    a file, named by its content and stored once
    <url>/<key>               the manifest of an artifact: name, size and SHA-256 of each file

A push uploads the objects that are missing, reads each one back, and writes the manifest last: one
that was cut off leaves no artifact. A pull compares every digest before the folder gets its name.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from rlhf_pipeline.data.files import explain_store_errors
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError, without_secrets
from rlhf_pipeline.runtime.files import put_in_place, require_space
from rlhf_pipeline.runtime.manifest import (
    CURVES,
    NAME,
    PIECE,
    FileEntry,
    Manifest,
    digest_of,
    write_pieces,
)

OBJECTS = "objects"
RENAMING = {"file", "local", "sftp", "ssh"}
"""Protocols with a rename that replaces a file at once. Object stores write a whole object."""
SMALL = 2**20  # bytes of the largest JSON file beside a manifest that is copied alone
_damaged: set[str] = set()  # digests of objects that the next push replaces


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
    if (found := digest_of(_pieces(store, target))) != digest:
        store.rm_file(target)
        raise StageError(
            f"{target}: found SHA-256 {found[:12]} after the upload, expected {digest[:12]}. "
            "Fix: check the store, and repeat the command"
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

    @contextmanager
    def _open(self) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
        """The file system and the path in it; inside the block its errors are explained."""
        with explained(self.url):
            store, root = open_store(self.url, **self._options)
            store.invalidate_cache()  # other machines write to it
            yield store, root

    def below(self, path: str) -> "Store":
        """The store of a folder, with objects of its own."""
        return Store(f"{self.url.rstrip('/')}/{path}", **self._options)

    def check(self) -> None:
        """Write and remove a tiny object.

        Raises ConfigError if the URL contains a secret, which messages and MLflow would show.
        """
        if self.name != self.url:
            raise ConfigError(
                f"{self.name}: found a user, a password or a query, expected none. Fix: set them "
                "as `credentials` of the catalog entry, or in the environment"
            )
        probe = f"write-test-{secrets.token_hex(4)}"  # another run may do the same
        self.write(probe, "may be removed")
        self.remove([probe])

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

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        with self._open() as (store, root):
            found = store.find(root)
        return sorted(path.removeprefix(root).lstrip("/") for path in found)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Another machine may have removed some of them."""
        for name in names:
            with self._open() as (store, root), suppress(FileNotFoundError):
                store.rm_file(f"{root}/{name}")

    def push(self, artifact: Path, key: str) -> None:
        """Upload the missing objects of an artifact, then its manifest."""
        for name, entry in Manifest.read(artifact).files.items():
            with self._open() as (store, root):
                target = f"{root}/{OBJECTS}/{entry.sha256}"
                found = None
                with suppress(FileNotFoundError):
                    found = store.info(target)["size"]
                if entry.sha256 in _damaged or found != entry.size:
                    upload(store, artifact / name, target, entry.sha256)
                    _damaged.discard(entry.sha256)
        self.write(key, (artifact / NAME).read_text())

    def manifest(self, key: str, fingerprint: str | None = None) -> Manifest | None:
        """The manifest of an artifact; None if the store does not have it.

        Raises ArtifactError if it is damaged, or of a recipe with another fingerprint.
        """
        with self._open() as (store, root):
            try:
                text = store.cat_file(f"{root}/{key}")
            except FileNotFoundError:
                return None
        try:
            manifest = Manifest.parse(text.decode())
        except ValueError:
            raise ArtifactError(
                f"{self.name}/{key} is damaged. Fix: restore or remove it in the store"
            ) from None
        if fingerprint not in (None, manifest.fingerprint):
            raise ArtifactError(
                f"{self.name}/{key}: found the manifest of recipe {manifest.fingerprint[:12]} "
                f"of stage {manifest.stage}, expected another recipe. Fix: remove it in the store"
            )
        return manifest

    def pull(self, manifest: Manifest, folder: Path, *, without_weights: bool = False) -> None:
        """Download an artifact unless the folder is a copy of it.

        A second process waits, by a lock beside the folder. `without_weights`, only the manifest,
        the folders, the curves and the small JSON files: what an artifact was made from and what it
        measured. Raises ArtifactError if an object is damaged in the store.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_of(folder, manifest):
                partial = folder.with_name(f"{folder.name}.partial")
                if not _is_of(partial, manifest):  # else the rest of a download that was cut off
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
                    manifest.write(partial)
                for name in manifest.files:
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                missing = {
                    name: entry
                    for name, entry in manifest.files.items()
                    if not ((partial / name).is_file() and entry.matches(partial / name))
                    and not (without_weights and _is_large(name, entry))
                }
                needed = sum(entry.size for entry in missing.values())
                require_space(partial, needed, f"{self.name}: the download")
                for name, entry in missing.items():
                    self._download(entry, partial / name, name)
                put_in_place(partial, folder)

    def _download(self, entry: FileEntry, path: Path, name: str) -> None:
        try:
            found = write_pieces(path, self._read(f"{OBJECTS}/{entry.sha256}"))
        except StoreError as error:
            reason = type(error.__context__).__name__
            if reason != "FileNotFoundError" and "Checksum" not in reason:  # of the store's client
                raise
            found = FileEntry.of(path)  # what has arrived
        if found != entry:
            _damaged.add(entry.sha256)
            path.unlink()
            raise ArtifactError(
                f"{self.name}/{OBJECTS}/{entry.sha256} ({name}): found {found.size} bytes with the "
                f"SHA-256 {found.sha256[:12]}, expected {entry.size} bytes with the SHA-256 in its "
                "name. Fix: restore it in the store"
            )

    def _read(self, name: str) -> Iterator[bytes]:
        """The bytes of a file. Only reading is inside `_open`: a full disk here is no fault of the
        store."""
        with self._open() as (store, root):
            yield from _pieces(store, f"{root}/{name}")


def _pieces(store: fsspec.AbstractFileSystem, path: str) -> Iterator[bytes]:
    """The bytes of a file. `get_file` of s3fs fails if a server sends a checksum of the parts."""
    with store.open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _is_large(name: str, entry: FileEntry) -> bool:
    return name != CURVES and not (name.endswith(".json") and entry.size <= SMALL)


def _is_of(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder contains this manifest."""
    with suppress(ArtifactError):
        return Manifest.read(folder) == manifest
    return False
