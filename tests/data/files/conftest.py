from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.data.formats import read_rows

Read = Callable[..., list[tuple[str, Any]]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file into the test's folder; returns its path."""

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def read() -> Read:
    """Reads all rows of a path."""
    return lambda path, columns=(), split="train": list(read_rows(str(path), columns, split))
