"""Write a file completely or not at all."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name, then rename it.

    A full disk or a kill therefore never leaves a truncated file.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
