"""What a running stage tells those who watch it: the progress display and the experiment tracker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class StageRun:
    """One recipe being run, or found finished."""

    stage: str
    fingerprint: str
    directory: Path
    """The work directory: job.json, metrics.jsonl, logs, checkpoints, export."""
    config: dict[str, Any]
    seed: int
    inputs: dict[str, str]
    """Input name to content digest."""
    cached: bool
    """True: finished earlier, nothing is launched."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Input name to where it lies, for inputs that are local."""
    resumed_from: int | None = None
    """The step that training goes on from, where an earlier attempt left a checkpoint."""
    adjusted: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that are not as configured, because that took too much memory: `smaller_batches.adjusted`."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """What the fingerprint is the digest of."""

    @property
    def title(self) -> str:
        """The stage's name; of the stages that read a source, which one."""
        return f"source {self.config['source']['name']}" if self.stage == "source" else self.stage

    @property
    def export(self) -> Path:
        """The finished artifact."""
        return self.directory / "export"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: {"step", "total_steps", "time", "metrics"}; step counts from 1."""
        return self.directory / "metrics.jsonl"


class StageListener(Protocol):
    """Someone who watches stages. A listener never makes a stage fail: it handles its own errors."""

    def stage_started(self, run: StageRun) -> None:
        """A program is about to be launched, or the result was found."""

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """New lines of the metrics file."""

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """The stage ended; metrics are those of its manifest."""


_listeners: list[StageListener] = []


@contextmanager
def listening(*listeners: StageListener) -> Iterator[None]:
    """Tell `listeners` about every stage that runs inside the block."""
    _listeners.extend(listeners)
    try:
        yield
    finally:
        for listener in listeners:
            _listeners.remove(listener)


def started(run: StageRun) -> None:
    """Tell all listeners that a stage begins, or was found finished."""
    for listener in _listeners:
        listener.stage_started(run)


def metrics(run: StageRun, records: list[dict[str, Any]]) -> None:
    """Tell all listeners of new lines in the stage's metrics file."""
    for listener in _listeners:
        listener.stage_metrics(run, records)


def ended(run: StageRun, status: Status, result: dict[str, float]) -> None:
    """Tell all listeners how the stage ended, with the metrics of its manifest."""
    for listener in _listeners:
        listener.stage_ended(run, status, result)
