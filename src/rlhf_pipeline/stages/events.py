"""What a running stage reports to the progress display and the experiment tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class StageRun:
    """One run of a stage, or the reuse of an earlier one."""

    stage: str
    fingerprint: str
    directory: Path
    """The work directory: job.json, metrics.jsonl, logs, checkpoints, export."""
    config: dict[str, Any]
    seed: int
    inputs: dict[str, str]
    """Input name to content digest."""
    cached: bool
    """True: the result of an earlier run is reused, nothing is launched."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Input name to path, for local inputs."""
    headline_metrics: tuple[str, ...] = ()
    """The metrics that the progress display shows."""
    resumed_from: int | None = None
    """The step of the checkpoint that training resumes from."""
    adjusted: Mapping[str, Any] = field(default_factory=dict)
    """Parameters changed after an out-of-memory failure, see `launch.oom_retry.adjusted`."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Everything that decides the result; the fingerprint is its digest."""

    @property
    def title(self) -> str:
        """The stage's name; for stage `source` also the name of the source."""
        return f"source {self.config['source']['name']}" if self.stage == "source" else self.stage

    @property
    def export(self) -> Path:
        """The finished artifact."""
        return self.directory / "export"

    @property
    def metrics_file(self) -> Path:
        """Metrics as JSON lines, see `runtime.metrics_file`."""
        return self.directory / "metrics.jsonl"


class StageListener(Protocol):
    """Follows the stages of a run. It handles its own errors and never makes a stage fail."""

    def stage_started(self, run: StageRun) -> None:
        """A program is about to be launched, or a result is reused."""

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """The metrics file has new records."""

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """The stage ended; `metrics` are those of its manifest."""


@dataclass(frozen=True)
class Listeners:
    """Several listeners as one."""

    listeners: tuple[StageListener, ...] = ()

    def stage_started(self, run: StageRun) -> None:
        """Call every listener."""
        for listener in self.listeners:
            listener.stage_started(run)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Call every listener."""
        for listener in self.listeners:
            listener.stage_metrics(run, records)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Call every listener."""
        for listener in self.listeners:
            listener.stage_ended(run, status, metrics)
