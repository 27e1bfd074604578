"""The work directories of stages: which contains the result of a recipe, and who uses it.

    <workspace>/<stage>/<fingerprint>      the first attempt; resumed until it is finished
                        <fingerprint>.2    a later attempt: a finished stage was forced to run again
                        <attempt>/<name>.damaged-<time>     a damaged folder, which `clean` removes
    <workspace>/.locks/<stage>-<fingerprint>.lock, .json    lock of the recipe and its owner
    <workspace>/champions/<digest>         a version of the model registry, from an MLflow server

The newest finished attempt is the result, so a forced attempt that fails loses nothing. Directory
names contain the first 16 digits of the fingerprint.
"""

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import machine
from rlhf_pipeline.runtime.manifest import NAME, Manifest
from rlhf_pipeline.stages.processes import may_run, this_process

logger = logging.getLogger(__name__)

RECIPE = "recipe.json"
"""File with the recipe. Its modification time is the time of the last use."""
DOWNLOADS = "champions"
"""Folder of the workspace with downloaded versions of the model registry."""
DAMAGED = ".damaged-"
_ATTEMPT = re.compile(r"[0-9a-z]{16}(\.[0-9]+)?")


def first_attempt(workspace: Path, stage: str, fingerprint: str) -> Path:
    """The directory of a recipe's first attempt."""
    return workspace / stage / fingerprint[:16]


def attempts(first: Path) -> list[Path]:
    """All work directories of a recipe, oldest first."""
    later = [path for path in first.parent.glob(f"{first.name}.*") if is_attempt(path)]
    return [path for path in (first, *sorted(later, key=_number)) if path.is_dir()]


def work_directory(artifact: Path, workspace: Path) -> Path | None:
    """The work directory in which an artifact was made; None if it was removed."""
    manifest = Manifest.read(artifact)
    found = attempts(first_attempt(workspace, manifest.stage, manifest.fingerprint))
    return next((path for path in reversed(found) if (path / "job.json").is_file()), None)


def downloads(workspace: Path) -> list[Path]:
    """The downloaded versions; those whose download is not finished are not among them."""
    return sorted(path.parent for path in (workspace / DOWNLOADS).glob(f"*/{NAME}"))


def next_directory(first: Path, finished: Path | None) -> Path:
    """Where the next launch works: in the newest attempt, or in a new one if that is finished."""
    newest = (attempts(first) or [first])[-1]
    return first.with_name(f"{first.name}.{_number(newest) + 1}") if newest == finished else newest


def is_attempt(path: Path) -> bool:
    """Whether a path has the name of a work directory."""
    return _ATTEMPT.fullmatch(path.name) is not None


def _number(path: Path) -> int:
    return int(path.suffix.removeprefix(".") or 1)


def damage(export: Path) -> str | None:
    """The first wrong name or size in a finished result, or None. `verify` also checks bytes."""
    try:
        files = Manifest.read(export).files
    except ArtifactError as error:
        return str(error)
    for name, entry in files.items():
        path = export / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.size:
            return f"{name} has {path.stat().st_size} bytes, expected {entry.size}"
    return None


def is_finished(directory: Path) -> bool:
    """Whether a work directory contains a result without `damage`."""
    return damage(directory / "export") is None


def set_aside(path: Path) -> Path:
    """Rename a damaged folder of a work directory, for `clean`; return its new path."""
    return path.rename(f"{path}{DAMAGED}{datetime.now():%Y-%m-%dT%H.%M.%S.%f}")


@contextmanager
def recipe_lock(first_attempt: Path, *, wait: bool = True, record: bool = True) -> Iterator[None]:
    """Lock a recipe: the work directory `first_attempt` and the later attempts beside it.

    The kernel releases the lock of a process that has ended. The owner is recorded: it may use the
    result until it ends, see `user`. `record=False` writes no record, which needs disk space.
    Raises StageError if another process holds the lock and `wait` is false.
    """
    file = _file(first_attempt)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        stage, recipe = first_attempt.parent.name, first_attempt.name[:8]
        holder = user(first_attempt) or "another process"
        held = f"stage {stage}: recipe {recipe} is being run by {holder}"
        if not wait:
            raise StageError(
                f"{held}. Fix: set launch.wait to true to wait for it, or end that process"
            ) from None
        logger.warning("%s; waiting until it ends", held)
        lock.acquire()
    try:
        if record:
            owner = {"driver": this_process(), "since": time.time()}
            write_atomically(file.with_suffix(".json"), json.dumps(owner))
        yield
    finally:
        lock.release()


def user(first_attempt: Path) -> str | None:
    """The process that last locked the recipe, and since when, in words; None if it has ended."""
    try:
        owner = json.loads(_file(first_attempt).with_suffix(".json").read_text())
        if not may_run(owner["driver"], owner["since"]):
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    pid = owner["driver"].removeprefix(f"{machine()} ").partition("@")[0]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"process {pid} since {since}"


def _file(first_attempt: Path) -> Path:
    """The lock file. It is outside the work directories, which may be removed during a wait."""
    stage = first_attempt.parent
    return stage.parent / ".locks" / f"{stage.name}-{first_attempt.name}.lock"
