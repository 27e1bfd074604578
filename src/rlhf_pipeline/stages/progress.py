"""The progress display: one line for the running stage."""

import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
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


@dataclass(frozen=True)
class StageProgress:
    """What the display knows about the running stage."""

    title: str
    phase: str
    started: float = field(default_factory=time.monotonic)
    step: int | None = None
    total: int | None = None  # number of steps, if it is known
    metrics: dict[str, float] = field(default_factory=dict)  # newest headline metrics
    measured: tuple[tuple[int, float], ...] = ()
    """Step and time of the first and of the newest record of this attempt: neither start-up nor the
    steps of earlier attempts count as speed."""

    def after(self, records: list[dict[str, Any]], run: StageRun) -> "StageProgress":
        """The progress after further records."""
        resumed = run.resume_from or 0
        new = [(each["step"], each["time"]) for each in records if each["step"] > resumed]
        metrics = dict(self.metrics)
        for record in records:
            metrics |= {k: v for k, v in record["metrics"].items() if k in run.headline_metrics}
        measured = (*self.measured, *new)
        return replace(
            self,
            step=max(records[-1]["step"], self.step or 0),
            total=records[-1]["total_steps"],
            metrics=metrics,
            measured=(measured[0], measured[-1]) if measured else (),
        )

    @property
    def left_s(self) -> float | None:
        """Seconds left at the speed of this attempt; None: unknown."""
        if not self.measured or self.total is None:
            return None
        (first, started), (last, now) = self.measured
        return (now - started) / (last - first) * (self.total - last) if last > first else None

    @property
    def numbers(self) -> list[str]:
        return [f"{name} {value:z.3f}" for name, value in self.metrics.items()]

    @property
    def steps(self) -> list[str]:
        return [] if self.step is None else [f"step {self.step}/{self.total or '?'}"]

    def live_line(self) -> Text:
        """The line of a terminal, which cuts off its end if it is narrow."""
        left = [] if self.left_s is None else [f"{_clock(self.left_s)} left"]
        elapsed = _clock(time.monotonic() - self.started)
        parts = [*self.steps, elapsed, *left, self.phase, *self.numbers]
        return Text(f"{self.title}: {'  '.join(parts)}", no_wrap=True, overflow="ellipsis")

    def log_line(self) -> str:
        left = [] if self.left_s is None else [f"{self.left_s:.0f} s left"]
        names_scorer = ": " in self.phase
        phase = [self.phase] if names_scorer or not self.steps else []
        return f"{self.title}: {'  '.join([*self.steps, *phase, *self.numbers, *left])}"


class ProgressDisplay(StageListener):
    """A live line on a terminal; otherwise a line every 15 seconds, so that logs stay readable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._progress = StageProgress("", "")
        self._last_line = 0.0

    def stage_started(self, run: StageRun) -> None:
        self._close()
        if run.cached:
            self._print(f"[bold]{run.title}[/]: reused {run.fingerprint[:8]}, finished earlier")
            return
        resumed = f", resuming from step {run.resume_from}" if run.resume_from is not None else ""
        where = f"running as {run.fingerprint[:8]} in {short_path(run.directory)}"
        self._print(f"[bold]{run.title}[/]: {where}{resumed}")
        self._progress = StageProgress(run.title, "importing libraries", step=run.resume_from)
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: self._progress.live_line(),
                console=self._console,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),  # a warning has a line of its own
            )
            self._live.start()

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        phase = PHASES.get(heartbeat.phase, heartbeat.phase)
        if heartbeat.scorer:
            seconds = max(0.0, time.time() - heartbeat.progressed)  # clocks of machines differ
            phase += f": {heartbeat.scorer}, {seconds:.0f} s"
        self._progress = replace(self._progress, phase=phase)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        if records:
            self._progress = self._progress.after(records, run)
        for record in records:
            if record["step"] > (run.resume_from or 0):  # an earlier attempt has shown the others
                self._show(record, run.title)
        if self._live is None and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._print(self._progress.log_line())

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        progress = self._progress
        self._close()
        if not run.cached:
            seconds = time.monotonic() - progress.started
            steps = progress.steps if progress.metrics and progress.step != progress.total else []
            ended = "  ".join([f"{ENDS[status]} {seconds:.0f} s", *steps, *progress.numbers])
            self._print(f"[bold]{run.title}[/]: {ended}")

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

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """`0:07`, `12:34` or `1:23:45`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
