"""Room on the disk: asked for before something large is written, and told where it ran out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.hints import DISK, find_hint


def require_room(directory: Path, needed: int, what: str, then: str = "") -> None:
    """Refuse to begin what cannot be ended.

    Args:
        directory: exists; where `what` is to be written.
        needed: bytes.
        what: in words.
        then: what the same command does once there is room.

    Raises:
        StageError: the file system has less.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StageError(
            f"{what} takes {_mib(needed)} MiB, and {directory} has {_mib(free)} MiB left; make room and run the same "
            f"command again{then}",
            cause=DISK,
        )


@contextmanager
def full_disk_told(what: str, place: Path) -> Iterator[None]:
    """Where the disk is full inside the block, say so in the stage's words.

    Raises:
        StageError: instead of the system's error, which names no file system.
    """
    try:
        yield
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else str(error)  # of a tree: its first file's
        hint = find_hint(reason)
        if hint is None or hint.name != DISK:
            raise
        raise StageError(
            f"{what}: {reason}\n  room     {room_left(place)}\n  try      {hint.advice}\n"
            "  again    the same command, once there is room: nothing that was finished is lost",
            cause=DISK,
        ) from error


def room_left(place: Path) -> str:
    """How full the file system is on which a path lies, or will lie, for people."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return f"{_mib(usage.free)} of {_mib(usage.total)} MiB are left on the file system of {place}"


def is_full(directory: Path) -> bool:
    """Whether hardly a line can be written."""
    return shutil.disk_usage(directory).free < 2**16


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}" if 0 < count < 10 * 2**20 else f"{count / 2**20:.0f}"
