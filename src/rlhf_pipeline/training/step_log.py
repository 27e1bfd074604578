"""The metrics of one training step: collected, checked, timed and written."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf_pipeline.training.divergence import DivergenceGuard


class StepLog:
    """One step. All ranks make the same calls."""

    def __init__(self, step: int, guard: DivergenceGuard) -> None:
        self.step = step
        self.metrics: dict[str, float] = {}
        self._guard = guard
        self._start = time.monotonic()

    def add(self, metrics: Mapping[str, float], fault: str | None = None) -> None:
        """Add metrics; fail if one is not finite, or if there is a fault.

        Raises StageError in that case; the metrics so far are on disk.
        """
        self.metrics |= metrics
        if fault is not None:
            self._guard.fail(self.step, self.metrics, fault)
        self._guard.require_finite(self.step, self.metrics)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the seconds of the block as the metric `name`."""
        start = time.monotonic()
        yield
        self.metrics[name] = time.monotonic() - start

    def write(self, *, due: bool) -> None:
        """Write the metrics with the time of the whole step, if it is due."""
        self.metrics["time/step_s"] = time.monotonic() - self._start
        if due:
            self._guard.writer.write(self.step, self.metrics)


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """The steps after which a model is evaluated: evenly spaced, the last one among them."""
    return {round(steps * (i + 1) / evaluations) for i in range(evaluations)}
