"""Write files completely or not at all, and only if they fit."""

import shutil
from pathlib import Path

from rlhf_pipeline.errors import StageError


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name, then rename it.

    A full disk or a kill therefore never leaves a truncated file.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


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
