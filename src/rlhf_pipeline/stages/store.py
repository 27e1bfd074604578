"""A store at any fsspec URL, where another machine finds finished stages and the newest checkpoint.

    <url>/objects/<sha256>                             a file, named by its content, stored once
    <url>/stages/<stage>/<fingerprint>.json            manifest of a finished stage
    <url>/checkpoints/<stage>/<fingerprint>/checkpoint.json, objects/...
                                                       the newest of an unfinished stage

A push uploads the objects that are missing, reads each one back, and writes the manifest last: one
that was cut off leaves no artifact. A pull compares every digest before the folder gets its name.
"""

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem

from rlhf_pipeline.data.files import explain_store_errors
from rlhf_pipeline.errors import ArtifactError, ConfigError, StageError, without_secrets
from rlhf_pipeline.runtime.files import put_in_place, require_space, write_atomically
from rlhf_pipeline.runtime.job import checkpoint_path, newest_step, newest_valid_step
from rlhf_pipeline.runtime.manifest import (
    CURVES,
    NAME,
    PIECE,
    FileEntry,
    Manifest,
    digest_of,
    file_entries,
    write_pieces,
)
from rlhf_pipeline.stages.job import StageRun, StageStore, Status, write_job

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.json"
MANIFEST_COPIES = ".store"  # folder of the workspace: stages that only the store contains
OBJECTS = "objects"
SMALL = 2**20  # bytes of the largest JSON file beside a manifest that is copied alone
POLL_S = 1.0  # seconds between two looks for a new checkpoint
RETRY_S = 20.0  # seconds between two attempts at a store that fails
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
        """Write a small file. A folder gets it completely or not at all, as object stores do."""
        with self._open() as (store, root):
            target = f"{root}/{name}"
            if isinstance(store, LocalFileSystem):
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(Path(target), text)
            else:
                store.pipe_file(target, text.encode())

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        with self._open() as (store, root):
            return sorted(path.removeprefix(root).lstrip("/") for path in store.find(root))

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
                size = store.size(target) if store.exists(target) else None
                if entry.sha256 in _damaged or size != entry.size:
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
        manifest = None
        with suppress(ValueError):
            manifest = Manifest.parse(text.decode())
        if manifest is None or fingerprint not in (None, manifest.fingerprint):
            raise ArtifactError(
                f"{self.name}/{key} is damaged, or of another recipe. Fix: restore or remove it in "
                "the store"
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
            with suppress(ArtifactError):
                if Manifest.read(folder) == manifest:
                    return
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            manifest.write(partial)
            needed = {
                name: entry
                for name, entry in manifest.files.items()
                if not without_weights
                or name == CURVES
                or (name.endswith(".json") and entry.size <= SMALL)
            }
            size = sum(entry.size for entry in needed.values())
            require_space(partial, size, f"{self.name}: the download")
            for name in manifest.files:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
            for name, entry in needed.items():
                self._download(entry, partial / name, name)
            put_in_place(partial, folder)

    def _download(self, entry: FileEntry, path: Path, name: str) -> None:
        found = write_pieces(path, self._read(f"{OBJECTS}/{entry.sha256}"))
        if found != entry:
            _damaged.add(entry.sha256)
            raise ArtifactError(
                f"{self.name}/{OBJECTS}/{entry.sha256} ({name}): found {found.size} bytes with the "
                f"SHA-256 {found.sha256[:12]}, expected {entry.size} bytes with the SHA-256 in its "
                "name. Fix: restore it in the store"
            )

    def _read(self, name: str) -> Iterator[bytes]:
        """The bytes of a file; none if it is lost. Only the reading is inside `_open`, so a full
        disk of this machine does not look like an error of the store."""
        with self._open() as (store, root), suppress(FileNotFoundError):
            yield from _pieces(store, f"{root}/{name}")


def _pieces(store: fsspec.AbstractFileSystem, path: str) -> Iterator[bytes]:
    """The bytes of a file. `get_file` of s3fs fails if a server sends a checksum of the parts."""
    with store.open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


class StoredStages(StageStore):
    """Downloads what a stage needs, and uploads what it makes.

    A thread uploads, so training never waits; what fails is tried again, with one warning for each
    outage. A stage that finds no store runs here. Machines that share a store do not wait for each
    other: if two run the same recipe, both train.
    """

    def __init__(self, store: Store, workspace: Path) -> None:
        self._store = store
        self._workspace = workspace
        self._running: StageRun | None = None
        self._pushed: tuple[str, int] | None = None
        """Fingerprint and step of the newest checkpoint in the store."""
        self._waiting: list[StageRun] = []
        """Ended stages that are not yet uploaded. Only the thread removes entries."""
        self._unusable: tuple[str, int] | None = None
        """Fingerprint and step of a checkpoint in the store that could not be downloaded."""
        self._reason = ""  # of the last upload, if it failed
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def manifest_copy(self, run: StageRun) -> Path | None:
        folder = self._workspace / MANIFEST_COPIES / run.stage / run.fingerprint[:16]
        found = self._pull(run, self._store, _key(run), folder / "export", without_weights=True)
        return folder if found else None

    def fetch(self, run: StageRun) -> bool:
        if not self._pull(run, self._store, _key(run), run.export):
            return False
        write_job(run)
        if (run.export / CURVES).is_file():  # for the tracker
            shutil.copy2(run.export / CURVES, run.metrics_file)
        logger.info("stage %s: downloaded from %s", run.stage, self._store.name)
        return True

    def newest_step(self, run: StageRun) -> int | None:
        with suppress(ArtifactError, StoreError):
            if (checkpoint := self._checkpoint(run)) is not None:
                return int(checkpoint.metrics["step"])
        return None

    def fetch_checkpoint(self, run: StageRun, local: int | None) -> int | None:
        folder = run.directory / "download"
        for _ in range(3):  # another machine may replace the checkpoint meanwhile
            stored = self.newest_step(run)
            if stored is not None and stored <= (local or 0):
                return local
            shutil.rmtree(folder, ignore_errors=True)  # a kill may have left a part of one
            found = self._pull(run, self._checkpoint_store(run), CHECKPOINT, folder)
            if found or stored is None or self.newest_step(run) == stored:
                break
        step = newest_valid_step(folder / "checkpoints")
        if step is None:  # there is none, or it was damaged in the store or before its upload
            self._unusable = None if stored is None else (run.fingerprint, stored)
            return local
        (folder / run.metrics_file.name).replace(run.metrics_file)
        put_in_place(folder / "checkpoints", run.checkpoints)
        shutil.rmtree(folder)
        logger.info("stage %s: checkpoint downloaded from %s", run.stage, self._store.name)
        return step

    def _pull(
        self, run: StageRun, store: Store, key: str, folder: Path, **options: Any
    ) -> Manifest | None:
        """Download a copy; None if the store has none that is whole, or fails."""
        try:
            manifest = store.manifest(key, run.fingerprint)
            if manifest is not None:
                store.pull(manifest, folder, **options)
            return manifest
        except (ArtifactError, StoreError) as error:
            logger.warning("stage %s: a copy in the store is not used: %s", run.stage, error)
            return None

    def stage_started(self, run: StageRun) -> None:
        if not run.cached:
            self._running = run
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        self._running = None
        self._waiting.append(run)

    def close(self) -> None:
        if self._thread is None:
            return
        if self._waiting:
            logger.info("uploading to %s: %s", self._store.name, self._titles())
        self._closing.set()
        self._thread.join()
        self._thread = None
        if self._waiting:
            raise StageError(
                f"{self._store.name} does not have all that this machine has of {self._titles()}: "
                f"{self._reason}. Then repeat the `kedro run`, which uploads the rest"
            )

    def _titles(self) -> str:
        return ", ".join(dict.fromkeys(run.title for run in self._waiting))

    def _work(self) -> None:
        """Upload again and again, and a last time at the end."""
        closing = False
        while not closing:
            closing = self._closing.wait(RETRY_S if self._reason else POLL_S)
            try:
                while self._waiting:
                    self._push(self._waiting[0])
                    del self._waiting[0]
                if (run := self._running) is not None:
                    self._push_checkpoint(run)
                self._reason = ""
            except Exception as error:  # the thread must survive
                if not self._reason:
                    logger.warning("training continues, the upload is tried again: %s", error)
                self._reason = str(error) or type(error).__name__

    def _push(self, run: StageRun) -> None:
        """Upload the artifact of an ended stage, and remove its checkpoints from the store.

        An artifact that was reused replaces none in the store. Without one, the last checkpoint.
        """
        if not (run.export / NAME).is_file():
            self._push_checkpoint(run)
            return
        stored = None
        if run.cached:
            with suppress(ArtifactError):
                stored = self._store.manifest(_key(run), run.fingerprint)
        if stored is None:
            self._store.push(run.export, _key(run))
        checkpoints = self._checkpoint_store(run)
        checkpoints.remove(checkpoints.names())  # by name: the manifest before its objects

    def _push_checkpoint(self, run: StageRun) -> None:
        """Upload the newest checkpoint unless the store has it; remove the one before."""
        step = newest_step(run.checkpoints)
        if step is None or (run.fingerprint, step) == self._pushed:
            return
        store, folder, former = self._checkpoint_store(run), run.directory / "upload", set[str]()
        with suppress(ArtifactError):
            if (checkpoint := self._checkpoint(run)) is not None:
                former = {entry.sha256 for entry in checkpoint.files.values()}
                stored = run.fingerprint, int(checkpoint.metrics["step"])
                if stored[1] > step and stored != self._unusable:  # another machine is ahead
                    return
        try:
            if not _snapshot(run, step, folder):
                return
            files, metrics = file_entries(folder), {"step": float(step)}
            Manifest(run.stage, run.fingerprint, run.seed, {}, {}, {}, metrics, files).write(folder)
            store.push(folder, CHECKPOINT)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._pushed = run.fingerprint, step
        # Objects that no manifest named may be another machine's upload, whose manifest follows.
        gone = former - {entry.sha256 for entry in files.values()}
        store.remove(f"{OBJECTS}/{digest}" for digest in sorted(gone))

    def _checkpoint(self, run: StageRun) -> Manifest | None:
        return self._checkpoint_store(run).manifest(CHECKPOINT, run.fingerprint)

    def _checkpoint_store(self, run: StageRun) -> Store:
        return self._store.below(f"checkpoints/{run.stage}/{run.fingerprint}")


def _key(run: StageRun) -> str:
    return f"stages/{run.stage}/{run.fingerprint}.json"


def _snapshot(run: StageRun, step: int, folder: Path) -> bool:
    """Link a checkpoint and the best models up to its step, which training may soon remove.

    Returns whether that was in time: training removes nothing that its newest checkpoint needs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        best = run.checkpoints.rglob("best-" + 8 * "[0-9]")  # a partial one has another name
        needed = [path for path in best if path.name <= f"best-{step:08d}"]
        for source in (checkpoint_path(run.checkpoints, step), *needed):
            for file in filter(Path.is_file, source.rglob("*")):
                target = folder / file.relative_to(run.directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, target)
        shutil.copy2(run.metrics_file, folder)
    except FileNotFoundError:  # training has just removed what it no longer needs
        return False
    return newest_step(run.checkpoints) == step
