"""The progress display: one line for the running stage."""

import math
import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from rlhf_pipeline.errors import printable, short_path, without_secrets
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.stages.job import StageListener, StageRun, Status

LOG_WIDTH = 500
"""Longest line with a text in a log."""
LINE_EVERY_S = 15.0
"""Seconds between two lines of progress if the output is not a terminal."""
PHASES = {"loading": "loading models and data", "finished": "finishing"}
"""Phases of a heartbeat in words; the others are words already."""
ENDS = {"FINISHED": "finished in", "FAILED": "failed after", "KILLED": "interrupted after"}


class LiveLine(ProgressColumn):
    """The line of a terminal, which cuts off its end if it is narrow."""

    def render(self, task: Task) -> Text:
        left = [] if task.time_remaining is None else [f"{_clock(task.time_remaining)} left"]
        parts = [*_steps(task), _clock(task.elapsed or 0), *left, task.fields["phase"]]
        line = f"{task.description}: {'  '.join([*parts, *_numbers(task)])}"
        return Text(line, no_wrap=True, overflow="ellipsis")


class ProgressDisplay(StageListener):
    """A live line on a terminal; otherwise a line every 15 seconds, so that logs stay readable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress = Progress(disable=True)  # of the running stage
        self._last_line = 0.0

    def stage_started(self, run: StageRun) -> None:
        self._progress.stop()
        if run.cached:
            self._print(f"[bold]{run.title}[/]: reused {run.fingerprint[:8]}, finished earlier")
            return
        resumed = f", resuming from step {run.resume_from}" if run.resume_from is not None else ""
        where = f"running as {run.fingerprint[:8]} in {short_path(run.directory)}"
        self._print(f"[bold]{run.title}[/]: {where}{resumed}")
        self._progress = Progress(
            LiveLine(),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # a warning has a line of its own
            speed_estimate_period=math.inf,  # one step may take minutes
            disable=not self._console.is_terminal,
        )
        # The first record starts the clock: neither start-up nor earlier attempts count as speed.
        self._progress.add_task(
            run.title,
            total=None,
            completed=run.resume_from or 0,
            phase="importing libraries",
            metrics={},
        )
        self._progress.start()

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        phase = PHASES.get(heartbeat.phase, heartbeat.phase)
        if heartbeat.scorer:
            seconds = max(0.0, time.time() - heartbeat.progressed)  # clocks of machines differ
            phase += f": {heartbeat.scorer}, {seconds:.0f} s"
        self._update(phase=phase)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        for record in records:
            shown = {k: v for k, v in record["metrics"].items() if k in run.headline_metrics}
            self._update(
                total=record["total_steps"],
                completed=max(record["step"], self._task.completed),
                metrics=self._task.fields["metrics"] | shown,
            )
            if record["step"] > (run.resume_from or 0):  # an earlier attempt has shown the others
                self._show(record, run.title)
        if not self._console.is_terminal and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._print(_log_line(self._task))

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        self._progress.stop()
        if not run.cached:
            task = self._task
            steps = _steps(task) if _numbers(task) and task.completed != task.total else []
            ended = [f"{ENDS[status]} {task.elapsed or 0:.0f} s", *steps, *_numbers(task)]
            self._print(f"[bold]{run.title}[/]: {'  '.join(ended)}")

    @property
    def _task(self) -> Task:
        return self._progress.tasks[0]

    def _update(self, **fields: Any) -> None:
        self._progress.update(self._task.id, **fields)

    def _show(self, record: dict[str, Any], title: str) -> None:
        """Print the answers of an evaluation during training, a line for each text, and a note."""
        if answers := record.get("answers", []):
            after = f"answers to held-out prompts after step {record['step']}"
            self._print(f"[bold]{title}[/]: {after}")
        for each in answers:
            numbers = (f"{name} {x:z.2f}" for name, x in each.items() if isinstance(x, float))
            last_turn = f"\n\n{each['prompt']}".rpartition("\n\nUser: ")[2]
            self._print_cut("prompt", last_turn)
            self._print_cut("answer", each["answer"] or "(empty)")
            self._print_cut("scores", ", ".join(numbers))
        if "note" in record:
            self._print(f"[bold]{title}[/]: {escape(record['note'])}")

    def _print_cut(self, what: str, text: str) -> None:
        """Print a text of others on one line, as it is, in characters that the console knows."""
        line = Text(f"  {what}  {printable(without_secrets(' '.join(text.split())))}")
        width = self._console.width if self._console.is_terminal else LOG_WIDTH
        line.truncate(width, overflow="ellipsis")
        encoding = self._console.encoding
        shown = line.plain.encode(encoding, "backslashreplace").decode(encoding)
        self._console.out(shown, highlight=False)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _log_line(task: Task) -> str:
    left = [] if task.time_remaining is None else [f"{task.time_remaining:.0f} s left"]
    names_scorer = ": " in task.fields["phase"]
    phase = [task.fields["phase"]] if names_scorer or not _steps(task) else []
    return f"{task.description}: {'  '.join([*_steps(task), *phase, *_numbers(task), *left])}"


def _steps(task: Task) -> list[str]:
    return [f"step {task.completed}/{task.total or '?'}"] if task.completed else []


def _numbers(task: Task) -> list[str]:
    return [f"{name} {value:z.3f}" for name, value in task.fields["metrics"].items()]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
