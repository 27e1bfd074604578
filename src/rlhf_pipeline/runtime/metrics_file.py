"""`metrics.jsonl`, the metrics of a stage: the program appends to it, the driver follows it.

One JSON object a line: {"step", "total_steps", "time", "metrics"}. Steps count from 1; step 0 is
before training. Time is in seconds since 1970, metrics maps `group/name` to a number. Some lines
have "answers", sampled ones with step, prompt and scores, or "note", a sentence for the user, or
"saw", digests of the rows that the first rank read and the answers that it sampled.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.manifest import CURVES, Manifest, verified


class MetricsFile:
    """Appends lines on the first rank; each is on disk when `write` returns.

    Training that resumes removes the lines after its checkpoint first: it writes them again.
    """

    def __init__(
        self, path: Path, total_steps: int | None, *, rank: int = 0, resumed_from: int | None = None
    ) -> None:
        if rank == 0 and resumed_from is not None:
            truncate_after(path, resumed_from)
        self._file = path.open("a", buffering=1) if rank == 0 else None
        self._total_steps = total_steps

    def write(self, step: int, metrics: dict[str, float], **further: Any) -> None:
        if self._file is not None:
            record = {"step": step, "total_steps": self._total_steps, "time": time.time()}
            self._file.write(json.dumps(record | {"metrics": metrics} | further) + "\n")


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines; a kill or a full disk can leave half a line at the end."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def answers_in(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers that a training has sampled at its evaluations, in order."""
    return [answer for record in records for answer in record.get("answers", [])]


def read_curves(artifact: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a trained model; none of other artifacts.

    Raises ArtifactError if they were changed after the training.
    """
    has_curves = CURVES in Manifest.read(artifact).files
    return read_json_lines(verified(artifact, CURVES)) if has_curves else []


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines after a step, and an incomplete last line."""
    kept = [record for record in read_json_lines(path) if record["step"] <= step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


class RowProgress:
    """Reports the progress of a program that reads rows, every two seconds. A step is a row."""

    _EVERY_S = 2.0

    def __init__(self, path: Path, total_rows: int | None) -> None:
        self._file = MetricsFile(path, total_rows)
        self._last = time.monotonic()

    def at(self, rows: int) -> None:
        if time.monotonic() - self._last > self._EVERY_S:
            self._last = time.monotonic()
            self._file.write(rows, {"data/rows_done": float(rows)})
