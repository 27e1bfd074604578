"""What ends training that goes wrong: in the step where it shows, on all ranks, with the evidence on disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.metrics_writer import MetricsWriter
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.training.best_models import BestModels


@dataclass(frozen=True)
class Watch:
    """Looks at the metrics of every step, written or not. They are sums over all ranks, so all ranks decide alike."""

    world: World
    writer: MetricsWriter
    best: BestModels
    remedy: Callable[[str], str]
    """What to do about a metric that is not finite, in the user's own parameters."""

    def require_finite(self, step: int, metrics: dict[str, float]) -> None:
        """Raise `StageError` that names the first metric that is not a finite number."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                cause = "training has diverged" + (
                    ", or did not start from a sound model" if step == 1 else ""
                )
                self.fail(
                    step, metrics, f"{name} is {value} at step {step}: {cause}; {self.remedy(name)}"
                )

    def fail(self, step: int, metrics: dict[str, float], fault: str) -> NoReturn:
        """Raise `StageError` with the fault and what is left; the step's metrics are on disk. All ranks call this together."""
        self.writer.write(step, metrics)
        self.world.barrier()  # the first rank to leave takes the others down, perhaps before the line is written
        raise StageError(f"{fault}. {self.best.kept}")


def steadier(place: str, config: TrainedModelConfig) -> str:
    """How the model configured at `place` trains more steadily, with the present values."""
    optimizer, precision = config.optimizer, config.deepspeed.precision
    wider = "is fp32 already" if precision == "fp32" else f"({precision}) may be too narrow"
    return (
        f"lower {place}optimizer.learning_rate ({optimizer.learning_rate:g}) or {place}optimizer.max_grad_norm "
        f"({optimizer.max_grad_norm:g}); {place}deepspeed.precision {wider}"
    )
