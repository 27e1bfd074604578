"""Read files of JSON lines that another process may be writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines; a kill or a full disk can leave half a line at the end."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
