"""The work directories of stages: which contains the result of a recipe, who uses it, and which
of them no published version needs.

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
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import machine
from rlhf_pipeline.runtime.job import newest_step
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest
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


@dataclass(frozen=True)
class Leftover:
    """A directory that can be removed."""

    path: Path
    why: str
    freed: int
    """Bytes that become free: none for files with other links."""


def survey(
    workspace: Path,
    stages: Collection[str],
    published: Collection[Path],
    unwanted: Mapping[Path, str],
    *,
    unfinished: bool,
) -> tuple[list[Leftover], dict[Path, str]]:
    """The directories to remove, and those kept although no published version needs them, and why.

    Args:
        stages: names of all stages; other folders of the workspace are ignored.
        published: the published versions to keep, with their inputs, direct or not.
        unwanted: further directories to remove, with the reason.
        unfinished: whether to remove unfinished stages that could resume from a checkpoint.

    Raises ArtifactError if the manifest of a published version is damaged: its inputs are unknown.
    """
    named = (path for stage in stages for path in (workspace / stage).glob("*"))
    directories, held = sorted(filter(is_attempt, named)), dict[Path, str]()
    for path in directories:
        step = None if unfinished or is_finished(path) else newest_step(path / "checkpoints")
        if holder := user(_first_of(path)):
            held[path] = f"in use by {holder}"
        elif step is not None:
            held[path] = f"can resume from step {step}; --unfinished removes it"
    jobs = [json.loads(job.read_text()) for path in held if (job := path / "job.json").is_file()]
    read = {place for job in jobs for place in job.get("inputs", {}).values()}
    held |= {path: "an input of a kept stage" for path in unwanted if str(path.resolve()) in read}
    manifests = [Manifest.read(path) for path in published]
    inputs = [manifest.inputs for manifest in manifests] + [job["digests"] for job in jobs]
    digests = {digest for each in inputs for digest in each.values()}
    needed = _needed(directories, {manifest.fingerprint for manifest in manifests}, digests)
    found = {path: why for path in directories if (why := _reason(path, needed)) is not None}
    gone = found.keys() - held.keys()
    found |= {path: why for path, why in unwanted.items() if path.parent not in gone}
    for path in [path for path in found if path.is_symlink() or path.parent.is_symlink()]:
        held.setdefault(path, f"is a link to {path.resolve()}; remove that yourself")
    leftovers = [
        Leftover(path, why, _freed(path)) for path, why in found.items() if path not in held
    ]
    return leftovers, {path: held[path] for path in found if path in held}


def remove(leftover: Leftover, workspace: Path) -> str | None:
    """Remove a leftover; if a process uses it by now, keep it and return that process in words."""
    if workspace not in leftover.path.parents[1:]:  # no attempt at a recipe
        shutil.rmtree(leftover.path)
        if not any(leftover.path.parent.iterdir()):
            leftover.path.parent.rmdir()
        return None
    first = _first_of(leftover.path)
    if holder := user(first):
        return holder
    try:
        with recipe_lock(first, wait=False, record=False):
            shutil.rmtree(leftover.path)
    except StageError:
        return user(first) or "another process"
    return None


def _first_of(path: Path) -> Path:
    """The directory of the first attempt at the same recipe."""
    return (path.parent if DAMAGED in path.name else path).with_suffix("")


def _needed(directories: list[Path], fingerprints: Set[str], digests: Set[str]) -> set[Path]:
    """Finished directories with these recipes or this content, and their inputs, direct or not."""
    pending = {path: Manifest.read(path / "export") for path in directories if is_finished(path)}
    needed: set[Path] = set()
    while found := [
        path for path, manifest in pending.items()
        if manifest.fingerprint in fingerprints or content_digest(path / "export") in digests
    ]:  # fmt: skip
        needed.update(found)
        digests |= {digest for path in found for digest in pending.pop(path).inputs.values()}
    return needed


def _reason(path: Path, needed: set[Path]) -> str | None:
    """Why a work directory can be removed unless it is held; None if it is needed."""
    if not (path / "export" / NAME).is_file():
        return "unfinished"
    if broken := damage(path / "export"):
        return f"damaged: {broken}"
    siblings = attempts(_first_of(path))
    if any(map(is_finished, siblings[siblings.index(path) + 1 :])):
        return "replaced by a later attempt"
    return None if path in needed else "nothing published was made from it"


def _freed(path: Path) -> int:
    files = [file.lstat() for file in path.rglob("*") if not file.is_dir()]
    return sum(file.st_size for file in files if file.st_nlink == 1)
