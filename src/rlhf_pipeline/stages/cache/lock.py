"""One run of a recipe at a time: a second one waits and reports the process that it waits for."""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rlhf_pipeline.errors import StageError, printable
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.stages.processes import machine, may_run, this_process

logger = logging.getLogger(__name__)


@contextmanager
def recipe_lock(
    first_attempt: Path,
    *,
    wait: bool = True,
    record: bool = True,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Lock a recipe: the work directory `first_attempt` and the later attempts beside it.

    The kernel releases the lock of a process that has ended. The owner is recorded: it may use the
    result until it ends, see `user`. `record=False` writes no record, which needs disk space.
    `while_waiting` is called once a second while another process holds the lock. Raises StageError
    if another process holds the lock and `wait` is false.
    """
    file = _file(first_attempt)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _report_holder(first_attempt, wait=wait)
        while not lock.is_locked:
            while_waiting()
            with suppress(Timeout):
                lock.acquire(timeout=1)
    try:
        if record:
            owner = {"driver": this_process(), "since": time.time()}
            write_atomically(file.with_suffix(".json"), json.dumps(owner))
        yield
    finally:
        lock.release()


def _report_holder(first_attempt: Path, *, wait: bool) -> None:
    holder = user(first_attempt) or "another process"
    stage, recipe = first_attempt.parent.name, first_attempt.name[:8]
    if not wait:
        raise StageError(
            f"stage {stage}: recipe {recipe} is being run by {holder}. Fix: set launch.wait to "
            "true to wait for it, or end that process"
        )
    logger.warning(
        "stage %s: recipe %s is being run by %s; waiting until it ends", stage, recipe, holder
    )


def await_programs(directory: Path) -> None:
    """Wait until no program of this user works in a directory.

    The programs of a killed driver outlive the driver and its lock by a few seconds. A program may
    also have been started by hand.
    """
    reported = False
    while found := list(_programs(str(directory / "job.json"))):
        if not reported:
            logger.warning(
                "process %s (%s) still works in %s; waiting until it ends", *found[0], directory
            )
        reported = True
        time.sleep(0.2)


def _programs(job: str) -> Iterator[tuple[int, str]]:
    """Number and command of each process of this user that runs a module with a job."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        command, uids = process.info["cmdline"] or [], process.info["uids"]
        at = next((i for i, word in enumerate(command) if word in ("-m", "--module")), None)
        if at is None or "python" not in Path(command[0]).name or uids.real != os.getuid():
            continue
        if job in command[at + 2 :]:
            yield process.pid, printable(f"python {shlex.join(command[at:])}")


def user(first_attempt: Path) -> str | None:
    """The process that last locked the recipe, and since when, in words; None if it has ended."""
    try:
        owner = json.loads(_file(first_attempt).with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    if not may_run(owner["driver"], owner["since"]):
        return None
    pid = owner["driver"].removeprefix(f"{machine()} ").partition("@")[0]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"process {pid} since {since}"


def _file(first_attempt: Path) -> Path:
    """The lock file; outside the work directories, which may be removed during a wait."""
    stage = first_attempt.parent
    return stage.parent / ".locks" / f"{stage.name}-{first_attempt.name}.lock"
