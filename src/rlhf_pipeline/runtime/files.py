"""Write files completely or not at all, force them to the disk, and only if they fit."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from rlhf_pipeline.errors import StageError


def write_atomically(path: Path, text: str, *, force: bool = True) -> None:
    """Write a file under another name, then rename it, so that nothing leaves a truncated file.

    Without `force`, a power cut may: for a file that is soon written again.
    """
    partial = path.with_name(f".{path.name}.partial")  # hidden: none of the user has that name
    try:
        partial.write_text(text, encoding="utf-8")
        if force:
            put_in_place(partial, path)
        else:
            partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def put_in_place(complete: Path, target: Path) -> None:
    """Give a complete file or folder its name, forced to the disk, and remove the earlier one.

    A kill leaves the earlier one or the new one. Where the file system cannot exchange folders,
    such as NFS, the earlier one may be left as `.outgoing`.
    """
    force_to_disk(complete)
    earlier = None
    if complete.is_dir() and target.is_dir():
        earlier = complete
        if not _exchanged(complete, target):
            earlier = target.with_name(f"{target.name}.outgoing")
            shutil.rmtree(earlier, ignore_errors=True)
            target.rename(earlier)
    if earlier != complete:
        complete.replace(target)
    _force(target.parent)
    if earlier is not None:
        shutil.rmtree(earlier)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names at once, by RENAME_EXCHANGE of Linux; False where that is not possible."""
    call = getattr(ctypes.CDLL(None), "renameat2", lambda *_: -1)
    return bool(call(0, os.fsencode(one.absolute()), 0, os.fsencode(other.absolute()), 2) == 0)


def force_to_disk(path: Path) -> None:
    """Force a file, or a folder with all that is in it, to the disk, and its name.

    The system writes seconds later, but may remove at once what `path` replaces.
    """
    for each in filter(Path.exists, (*path.rglob("*"), path, path.parent)):
        _force(each)


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot force folders
            raise
    finally:
        os.close(descriptor)


def require_space(directory: Path, needed: int, what: str) -> None:
    """Fail before a write of `needed` bytes that cannot succeed; the driver adds what to do.

    Raises StageError if the file system has less space.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StageError(
            f"{what} needs {mebibytes(needed)} MiB, {directory} has {mebibytes(free)} MiB free"
        )


def mebibytes(count: int) -> str:
    """A number of bytes in MiB, with one decimal below 10 MiB."""
    return f"{count / 2**20:.1f}" if 0 < count < 10 * 2**20 else f"{count / 2**20:.0f}"
