"""A full disk in the driver itself, and what its messages say about it."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.files import mebibytes
from rlhf_pipeline.stages.launch.hints import DISK_FULL, find_hint


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
        hint = find_hint(reason)
        if hint is None or hint.name != DISK_FULL:
            raise
        raise StageError(
            f"{what}: {reason}\n  space    {space_left(path)}\n  fix      {hint.advice}\n"
            "  again    the same command, once there is space; finished stages are kept",
            cause=DISK_FULL,
        ) from error


def space_left(path: Path) -> str:
    """Free and total space of the file system that contains a path, or will contain it."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    free, total = mebibytes(usage.free), mebibytes(usage.total)
    return f"{free} of {total} MiB are free on the file system of {path}"


def is_full(directory: Path) -> bool:
    """Whether a file of 64 KiB does not fit, because the disk or a quota is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False
