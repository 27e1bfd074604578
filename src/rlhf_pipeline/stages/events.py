"""What a running stage reports to the progress display and the experiment tracker."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob, title

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class StageRun(LaunchedJob):
    """One run of a stage, or the reuse of an earlier one: its job, and what only the driver has."""

    cached: bool = False
    """True: the result of an earlier run is reused, nothing is launched."""
    headline_metrics: tuple[str, ...] = ()
    """The metrics that the progress display shows."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Everything that decides the result; the fingerprint is its digest."""

    @property
    def title(self) -> str:
        return title(self.stage, self.config)


class StageListener:
    """Follows the stages of a run. It handles its own errors and never makes a stage fail.

    A subclass defines the methods for the events that it needs. An instance of this class passes
    every event on to several listeners.
    """

    listeners: "tuple[StageListener, ...]" = ()

    def __init__(self, *listeners: "StageListener") -> None:
        self.listeners = listeners

    def stage_started(self, run: StageRun) -> None:
        """A program is about to be launched, or a result is reused."""
        for listener in self.listeners:
            listener.stage_started(run)

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        """The first rank has reported what it does; called several times a second."""
        for listener in self.listeners:
            listener.stage_phase(run, heartbeat)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """The metrics file has new records."""
        for listener in self.listeners:
            listener.stage_metrics(run, records)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """The stage ended; `metrics` are those of its manifest."""
        for listener in self.listeners:
            listener.stage_ended(run, status, metrics)
