"""The metrics file of a stage, from the program's side: a line of JSON at a time, see `rlhf_pipeline.stages.events`."""

from __future__ import annotations

import json
import time
from pathlib import Path


class MetricsFile:
    """Appends to `metrics.jsonl`; steps count from 1."""

    def __init__(self, path: Path, total_steps: int | None) -> None:
        self._file = path.open("a", buffering=1)
        self._total_steps = total_steps

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line."""
        record = {"step": step, "total_steps": self._total_steps, "time": time.time(), "metrics": metrics}
        self._file.write(json.dumps(record) + "\n")


def forget_after(path: Path, step: int) -> None:
    """Drop the lines after a step, half a line at the end included: training goes on from there and writes them again."""
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.is_file() else []
    )
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
    partial.rename(path)


class RowProgress:
    """A line of metrics every few seconds for a program that works through rows; a step is a row."""

    _EVERY_S = 2.0

    def __init__(self, path: Path, total_rows: int | None) -> None:
        self._file = MetricsFile(path, total_rows)
        self._last = time.monotonic()

    def at(self, rows: int) -> None:
        """So many rows are done."""
        if time.monotonic() - self._last > self._EVERY_S:
            self._last = time.monotonic()
            self._file.write(rows, {"data/rows_done": float(rows)})
