"""Metrics of a training stage: what the driver shows and the tracker stores."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.stages.metrics import MetricsFile
from rlhf_pipeline.training.engine import World


class MetricsWriter:
    """Appends to `metrics.jsonl`, on the first rank only; steps count from 1."""

    def __init__(self, path: Path, world: World, total_steps: int) -> None:
        self._file = MetricsFile(path, total_steps) if world.rank == 0 else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line, on disk when this returns."""
        if self._file is not None:
            self._file.write(step, metrics)
