"""The progress display: a bar for the running stage with its headline metrics and the time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlhf_pipeline.stages.events import StageListener, StageRun, Status

LINE_EVERY_S = 15.0
"""Seconds between two lines of progress if the output is not a terminal."""


class ProgressDisplay(StageListener):
    """A live bar on a terminal; otherwise a line every 15 seconds, so that logs stay readable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._shown: dict[str, float] = {}
        self._start = self._last_line = 0.0
        self._first: tuple[int, float] | None = None

    def stage_started(self, run: StageRun) -> None:
        """Announce the stage; open a bar unless the stage is reused."""
        self._shown, self._start, self._first = {}, time.monotonic(), None
        if run.cached:
            self._print(f"[bold]{run.title}[/]: reused {run.fingerprint[:8]}, finished earlier")
            return
        resumed = f", resumed from step {run.resume_from}" if run.resume_from is not None else ""
        self._print(
            f"[bold]{run.title}[/]: running as {run.fingerprint[:8]} in {run.directory}{resumed}"
        )
        for name, size in run.adjusted.items():
            self._print(
                f"  out of memory: {name} reduced from {size['configured']} to {size['used']}; the "
                "global batch is unchanged"
            )
        if self._console.is_terminal:
            self._open_bar(run.title)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """Move the bar to the newest record."""
        for record in records:
            self._shown |= {k: v for k, v in record["metrics"].items() if k in run.headline_metrics}
        step, total = records[-1]["step"], records[-1]["total_steps"]
        if self._progress is not None:
            (task,) = self._progress.task_ids
            self._progress.update(task, completed=step, total=total, numbers=self._numbers())
        elif time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            time_left = self._time_left(records[-1])
            self._print(f"{run.title}: step {step}/{total or '?'}  {self._numbers()}{time_left}")

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """Close the bar; print the outcome."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if not run.cached:
            seconds = time.monotonic() - self._start
            self._print(
                f"[bold]{run.title}[/]: {status.lower()} in {seconds:.0f} s  {self._numbers()}"
            )

    def _open_bar(self, title: str) -> None:
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
        self._progress.add_task(title, total=None, numbers="starting")
        self._progress.start()

    def _time_left(self, record: dict[str, Any]) -> str:
        """Time left at the speed since the first record; the program's start-up is excluded."""
        if self._first is None:
            self._first = record["step"], record["time"]
        steps, seconds = record["step"] - self._first[0], record["time"] - self._first[1]
        if record["total_steps"] is None or steps <= 0:
            return ""
        return f"  {seconds / steps * (record['total_steps'] - record['step']):.0f} s left"

    def _numbers(self) -> str:
        return "  ".join(f"{name} {value:.3f}" for name, value in self._shown.items())

    def _print(self, text: str) -> None:
        self._console.print(text.rstrip(), highlight=False, soft_wrap=True)
