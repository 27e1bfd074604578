"""Metrics of a training stage: what the driver shows and the tracker stores."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.runtime.metrics_file import MetricsFile, truncate_after


class MetricsWriter:
    """Appends to `metrics.jsonl`, on the first rank only; steps count from 1.

    Where training goes on from a checkpoint, lines after its step are dropped first: they are written again.
    """

    def __init__(
        self, path: Path, world: World, total_steps: int, *, resumed_from: int | None = None
    ) -> None:
        if world.rank == 0 and resumed_from is not None:
            truncate_after(path, resumed_from)
        self._file = MetricsFile(path, total_steps) if world.rank == 0 else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line, on disk when this returns."""
        if self._file is not None:
            self._file.write(step, metrics)
