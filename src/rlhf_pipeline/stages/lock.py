"""One run of a recipe at a time: the second waits, and says for whom."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.program import driver_id
from rlhf_pipeline.stages.workspace import write_whole

logger = logging.getLogger(__name__)


@contextmanager
def recipe_lock(first_attempt: Path, *, wait: bool = True, record: bool = True) -> Iterator[None]:
    """Hold a recipe, whose work directories are `first_attempt` and those beside it.

    The kernel frees the lock of a process that is gone, however it went. Who took it last stays on record: until that
    process ends it may use the result, see `user`. Who only removes leaves no record, which takes room.

    Raises:
        StageError: another process holds the recipe and `wait` is false.
    """
    file = _file(first_attempt)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _meet_holder(first_attempt, wait=wait)
        lock.acquire()
    try:
        if record:
            owner = {"driver": driver_id(os.getpid()), "since": time.time()}
            write_whole(file.with_suffix(".json"), json.dumps(owner))
        yield
    finally:
        lock.release()


def _meet_holder(first_attempt: Path, *, wait: bool) -> None:
    holder = user(first_attempt) or "another process"
    stage, recipe = first_attempt.parent.name, first_attempt.name[:8]
    if not wait:
        raise StageError(
            f"stage {stage}: recipe {recipe} is being run by {holder}; wait for it (launch.wait: true), or end that process"
        )
    logger.warning("stage %s: recipe %s is being run by %s; waiting for it to end", stage, recipe, holder)


def await_programs(directory: Path) -> None:
    """Wait until no program works in a directory any more.

    The programs of a killed driver outlive it, and its lock, by up to a second or so; one may have been started by hand.
    """
    job = str(directory / "job.json")
    told = False
    while pids := [
        process.pid for process in psutil.process_iter(["cmdline"]) if job in (process.info["cmdline"] or [])
    ]:
        if not told:
            logger.warning("process %s still works in %s; waiting for it to end", pids[0], directory)
        told = True
        time.sleep(0.2)


def user(first_attempt: Path) -> str | None:
    """The living process that last took the recipe, and since when, for people; None where there is none."""
    try:
        owner = json.loads(_file(first_attempt).with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    pid = owner["driver"].partition("@")[0]
    if driver_id(int(pid)) != owner["driver"]:
        return None
    return f"process {pid} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(owner['since']))}"


def _file(first_attempt: Path) -> Path:
    """The lock lies beside the work directories, which come and go while someone waits for it."""
    return first_attempt.parent.parent / ".locks" / f"{first_attempt.parent.name}-{first_attempt.name}.lock"
