"""Disk space: check it before a large write, report a full disk."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import StageError

DISK_FULL = "disk full"
"""Name of this failure, the `cause` of its `StageError`."""

DISK_FULL_PATTERN = r"No space left on device|Disk quota exceeded|ENOSPC|MiB free; free some space"
"""Regular expression for a full disk in messages of the system and of `require_space`."""

ADVICE = (
    "Check with `df -h` and `du -sh data/*`. Finished stages keep their exports, unfinished stages "
    "keep `keep_last` checkpoints; `kedro rlhf clean` shows what can be removed."
)


def require_space(directory: Path, needed: int, what: str, then: str = "") -> None:
    """Fail before a write that cannot succeed.

    Args:
        directory: an existing directory on the file system that `what` is written to.
        needed: bytes.
        what: what is written, for the message.
        then: what the same command does once there is space, for the message.

    Raises:
        StageError: the file system has less space.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StageError(
            f"{what} needs {_mib(needed)} MiB, {directory} has {_mib(free)} MiB free; free some "
            f"space and run the same command again{then}",
            cause=DISK_FULL,
        )


@contextmanager
def explain_full_disk(what: str, path: Path) -> Iterator[None]:
    """Turn the system's error for a full disk inside the block into a `StageError`.

    The system's error does not name the file system.
    """
    try:
        yield
    except OSError as error:
        # shutil reports a tree as a list of failures; the first one is enough.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else str(error)
        if re.search(DISK_FULL_PATTERN, reason) is None:
            raise
        raise StageError(
            f"{what}: {reason}\n  space    {space_left(path)}\n  fix      {ADVICE}\n"
            "  again    the same command, once there is space; finished stages are kept",
            cause=DISK_FULL,
        ) from error


def space_left(path: Path) -> str:
    """Free and total space of the file system that contains a path, or will contain it."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return f"{_mib(usage.free)} of {_mib(usage.total)} MiB are free on the file system of {path}"


def is_full(directory: Path) -> bool:
    """Whether a file of 64 KiB does not fit, because the disk or a quota is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}" if 0 < count < 10 * 2**20 else f"{count / 2**20:.0f}"
