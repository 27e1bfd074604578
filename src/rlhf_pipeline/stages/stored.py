"""Copies of finished stages, and of checkpoints of the running one, in a store for other machines.

    stages/<stage>/<fingerprint>.json                  manifest of a finished stage
    checkpoints/<stage>/<fingerprint>/checkpoint.json  newest checkpoint of an unfinished one

A thread of the driver uploads, so training never waits. A store that fails costs one warning for
each outage. The upload is tried again, and a stage that finds no store runs here.
"""

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.files import put_in_place
from rlhf_pipeline.runtime.job import checkpoint_path, newest_step, newest_valid_step
from rlhf_pipeline.runtime.manifest import CURVES, NAME, Manifest, file_entries
from rlhf_pipeline.stages.job import StageRun, StageStore, Status, write_job
from rlhf_pipeline.storage.store import OBJECTS, Store, StoreError, link_or_copy

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.json"
POLL_S, RETRY_S = 1.0, 20.0
"""Seconds between two looks for a new checkpoint, and between two attempts to reach the store."""
MANIFEST_COPIES = ".store"  # folder of the workspace: stages that only the store contains


class StoredStages(StageStore):
    """Downloads what a stage needs, and uploads what it makes.

    Machines that share a store do not wait for each other: if two run the same recipe, both train.
    """

    def __init__(self, store: Store, workspace: Path) -> None:
        self._store = store
        self._workspace = workspace
        self._running: StageRun | None = None
        self._pushed: tuple[str, int] | None = None
        """Fingerprint and step of the newest checkpoint in the store."""
        self._waiting: list[StageRun] = []
        """Ended stages that are not yet uploaded. Only the thread removes entries."""
        self._reason = ""  # of the last upload that failed
        self._unreachable = False  # at the last download
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def manifest_copy(self, run: StageRun) -> Path | None:
        folder = self._workspace / MANIFEST_COPIES / run.stage / run.fingerprint[:16]
        found = _pull(run, self._store, _key(run), folder / "export", without_weights=True)
        return folder if found else None

    def fetch(self, run: StageRun) -> bool:
        with self._without_the_store(run):
            if not _pull(run, self._store, _key(run), run.export):
                return False
            write_job(run)
            if (run.export / CURVES).is_file():  # for the tracker
                shutil.copy2(run.export / CURVES, run.metrics_file)
            logger.info("stage %s: downloaded from %s", run.stage, self._store.name)
            return True
        return False

    def fetch_checkpoint(self, run: StageRun, local: int | None) -> int | None:
        with self._without_the_store(run):
            folder, stored = run.directory / "download", self.newest_step(run)
            if stored is None or stored <= (local or 0):
                return local
            shutil.rmtree(folder, ignore_errors=True)  # a kill may have left a part of one
            _pull(run, self._checkpoint_store(run), CHECKPOINT, folder)
            step = newest_valid_step(folder / "checkpoints")
            if step is not None:  # else it was damaged in the store, or before it was uploaded
                (folder / run.metrics_file.name).replace(run.metrics_file)
                put_in_place(folder / "checkpoints", run.checkpoints)
                shutil.rmtree(folder)
                logger.info("stage %s: checkpoint downloaded from %s", run.stage, self._store.name)
                return step
        return local

    @contextmanager
    def _without_the_store(self, run: StageRun) -> Iterator[None]:
        """Continue without the store if it fails, and warn once for each outage."""
        try:
            yield
            self._unreachable = False
        except StoreError as error:
            if not self._unreachable:
                logger.warning("stage %s runs without the store: %s", run.stage, error)
            self._unreachable = True

    def newest_step(self, run: StageRun) -> int | None:
        checkpoint = self._checkpoint(run)
        return None if checkpoint is None else int(checkpoint.metrics["step"])

    def stage_started(self, run: StageRun) -> None:
        """Watch the checkpoints of a stage."""
        if not run.cached:
            self._running = run
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Upload what the stage has made."""
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
        """Upload again and again, more rarely while the store fails, and a last time at the end."""
        closing = failing = False
        while not closing:
            closing = self._closing.wait(RETRY_S if failing else POLL_S)
            try:
                while self._waiting:
                    self._push(self._waiting[0])
                    del self._waiting[0]
                if (run := self._running) is not None:
                    self._push_checkpoint(run)
            except Exception as error:  # the thread must survive
                self._reason = str(error)
                if not failing:
                    logger.warning("training continues, the upload is tried again: %s", error)
                failing = True
            else:
                if failing:
                    logger.warning("%s: uploads work again", self._store.name)
                failing = False

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
        if (checkpoint := self._checkpoint(run)) is not None:
            former = {entry.sha256 for entry in checkpoint.files.values()}
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
        """The manifest of the checkpoint in the store; None without one, or if it is damaged."""
        with suppress(ArtifactError):
            return self._checkpoint_store(run).manifest(CHECKPOINT, run.fingerprint)
        return None

    def _checkpoint_store(self, run: StageRun) -> Store:
        return self._store.below(f"checkpoints/{run.stage}/{run.fingerprint}")


def _key(run: StageRun) -> str:
    return f"stages/{run.stage}/{run.fingerprint}.json"


def _pull(run: StageRun, store: Store, key: str, folder: Path, **options: Any) -> bool:
    """Download a copy by `Store.pull`. False: the store has none that is whole."""
    try:
        manifest = store.manifest(key, run.fingerprint)
        if manifest is not None:
            store.pull(manifest, folder, **options)
        return manifest is not None
    except ArtifactError as error:
        logger.warning("stage %s: a copy in the store is not used: %s", run.stage, error)
        return False


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
