"""Writing the metrics of a training stage, for the progress display and the tracker."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.runtime.metrics_file import MetricsFile, truncate_after


class MetricsWriter:
    """Appends to `metrics.jsonl` on the first rank; steps count from 1.

    Resumed training first removes the lines after its checkpoint, because it writes them again.
    """

    def __init__(
        self, path: Path, world: World, total_steps: int, *, resumed_from: int | None = None
    ) -> None:
        if world.rank == 0 and resumed_from is not None:
            truncate_after(path, resumed_from)
        self._file = MetricsFile(path, total_steps) if world.rank == 0 else None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line; it is on disk when this method returns."""
        if self._file is not None:
            self._file.write(step, metrics)
