"""The progress display: a bar for the running stage with its headline metrics and the time left."""

from __future__ import annotations

import logging
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlhf_pipeline.stages.events import StageRun, Status

logger = logging.getLogger(__name__)

LINE_EVERY_S = 15.0
"""Seconds between two lines if the output is not a terminal."""


class ProgressDisplay:
    """A live bar on a terminal; otherwise a line every 15 seconds, so that logs stay readable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown: dict[str, float] = {}
        self._start = self._last_line = 0.0
        self._first: tuple[int, float] | None = None

    def stage_started(self, run: StageRun) -> None:
        """Announce the stage; open a bar unless its result is reused."""
        self._shown, self._start, self._first = {}, time.monotonic(), None
        if run.cached:
            self._say(f"[bold]{run.title}[/]: reused {run.fingerprint[:8]}, finished earlier")
            return
        resumed = f", resumed from step {run.resumed_from}" if run.resumed_from is not None else ""
        self._say(
            f"[bold]{run.title}[/]: running as {run.fingerprint[:8]} in {run.directory}{resumed}"
        )
        for place, size in run.adjusted.items():
            self._say(
                f"  out of memory: {place} reduced from {size['configured']} to {size['used']}; the global batch is unchanged"
            )
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task(run.title, total=None, numbers="starting")
            self._progress.start()

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Move the bar to the newest line of metrics."""
        for record in records:
            self._shown |= {k: v for k, v in record["metrics"].items() if k in run.headline_metrics}
        step, total = records[-1]["step"], records[-1]["total_steps"]
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, total=total, numbers=self._numbers())
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._say(
                f"{run.title}: step {step}/{total or '?'}  {self._numbers()}{self._left(records[-1])}"
            )

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Close the bar; print the outcome."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None
        if not run.cached:
            self._say(
                f"[bold]{run.title}[/]: {status.lower()} in {time.monotonic() - self._start:.0f} s  {self._numbers()}"
            )

    def _left(self, record: dict[str, Any]) -> str:
        """Time left at the pace since the first line of metrics; the start-up of the program is excluded."""
        if self._first is None:
            self._first = record["step"], record["time"]
        steps, seconds = record["step"] - self._first[0], record["time"] - self._first[1]
        if record["total_steps"] is None:
            return ""
        return (
            f"  {seconds / steps * (record['total_steps'] - record['step']):.0f} s left"
            if steps > 0
            else ""
        )

    def _numbers(self) -> str:
        return "  ".join(f"{name} {value:.3f}" for name, value in self._shown.items())

    def _say(self, text: str) -> None:
        self._console.print(text.rstrip(), highlight=False, soft_wrap=True)
