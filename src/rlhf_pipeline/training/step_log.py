"""The metrics of one training step: collected, timed, checked and written."""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.training.checkpoints import BestModels


@dataclass(frozen=True)
class DivergenceGuard:
    """Ends diverging training in the step where it shows.

    Metrics are sums over all ranks, so all ranks decide alike.
    """

    world: World
    writer: MetricsFile
    best: BestModels
    advice: Callable[[str], str]
    """The fix for a metric that is not finite, in terms of the parameters."""

    def check(self, step: int, metrics: dict[str, float], fault: str | None) -> None:
        """For a fault, or a metric that is not a finite number, write the metrics of the step and
        raise `StageError`. All ranks call this together."""
        unsound = (name for name, value in metrics.items() if not math.isfinite(value))
        if fault is None and (name := next(unsound, None)) is not None:
            start = ", or the initial model is damaged" if step <= 1 else ""
            cause = f"training has diverged{start}"
            fault = f"{name} is {metrics[name]} at step {step}: {cause}. Fix: {self.advice(name)}"
        if fault is not None:
            self.writer.write(step, metrics)
            # The first rank that exits ends the others, perhaps before the line is written.
            self.world.barrier()
            raise StageError(f"{fault}. {self.best.kept}")


class StepLog:
    """One step. All ranks make the same calls."""

    def __init__(self, step: int, guard: DivergenceGuard) -> None:
        self.step = step
        self.metrics: dict[str, float] = {}
        self.further: dict[str, Any] = {}  # fields of the line, see `metrics_file`
        self._guard = guard
        self._start = time.monotonic()

    def add(self, metrics: Mapping[str, float], fault: str | None = None) -> None:
        """Add metrics; raise StageError if one is not finite, or for a fault."""
        self.metrics |= metrics
        self._guard.check(self.step, self.metrics, fault)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.metrics[name] = time.monotonic() - start

    def saw(self, **read: np.ndarray | Tensor) -> None:
        """Note what the first rank read and sampled, as CRC-32: `kedro rlhf prove` compares it."""
        arrays = {name: np.asarray(torch.as_tensor(each).cpu()) for name, each in read.items()}
        self.further["saw"] = {name: zlib.crc32(each.tobytes()) for name, each in arrays.items()}

    def write(self, *, due: bool) -> None:
        self.metrics["time/step_s"] = time.monotonic() - self._start
        if due:
            self._guard.writer.write(self.step, self.metrics, **self.further)


def stability_advice(place: str, config: TrainedModelConfig) -> str:
    """How to train the model of the block `place` more stably, with the present values."""
    optimizer, precision = config.optimizer, config.deepspeed.precision
    wider = "is fp32 already" if precision == "fp32" else f"({precision}) may be too narrow"
    return (
        f"lower {place}optimizer.learning_rate ({optimizer.learning_rate:g}) or "
        f"{place}optimizer.max_grad_norm ({optimizer.max_grad_norm:g}); "
        f"{place}deepspeed.precision {wider}"
    )
