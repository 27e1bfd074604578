"""The ranks of a launch as the driver sees them: their progress, and which of them ended too early.

DeepSpeed's launcher checks the ranks once a second and returns the exit code of the first failed
rank that it meets, which may have failed only because a peer was lost. So the driver checks the
ranks itself, more often.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats
from rlhf_pipeline.runtime.program import ERRORS

STARTUP_S = 300.0
"""Seconds that the ranks have at least for their first report: imports come before it."""


@dataclass(frozen=True)
class Death:
    """A rank that ended before its work was done, and left no reason."""

    heartbeat: Heartbeat
    """The last heartbeat of the rank."""
    seen: float
    """When the driver saw the death, seconds since 1970."""
    status: int | None
    """The exit code, or the negative number of the signal that ended the rank. None: unknown."""


class Ranks:
    """Follows the ranks through the files they write and the kernel's table of processes."""

    def __init__(self, directory: Path, processes: int, hang_timeout_s: float | None) -> None:
        self._directory = directory
        self.processes = processes
        self._hang_timeout_s = hang_timeout_s
        self.heartbeats: dict[int, Heartbeat] = {}
        self.deaths: dict[int, Death] = {}
        self._progressed = time.monotonic()
        self._failed_at: float | None = None

    def update(self) -> None:
        """Read heartbeats, reports and the table of processes; called several times a second."""
        ended = {
            rank: status
            for rank, heartbeat in self.heartbeats.items()
            if rank not in self.deaths and (status := _status(heartbeat.pid)) != "running"
        }
        self.read()  # after the table of processes: a rank writes a last heartbeat before it ends
        newest = self.heartbeats
        reports = (self._directory / ERRORS).glob("*.txt")
        reported = {int(report.stem.rpartition("-rank")[2]) for report in reports}
        for rank, status in ended.items():
            if newest[rank].phase != "finished" and rank not in reported:
                known = None if isinstance(status, str) else status
                self.deaths[rank] = Death(newest[rank], time.time(), known)
        if self._failed_at is None and (reported or self.deaths):
            self._failed_at = time.monotonic()

    def read(self) -> list[int]:
        """Read the heartbeats, without judging what has ended; return the ranks that are alive."""
        newest = read_heartbeats(self._directory)
        if newest != self.heartbeats:
            self.heartbeats, self._progressed = newest, time.monotonic()
        return self.alive

    @property
    def finished(self) -> bool:
        """Whether all ranks have reported that their work is done, and have ended."""
        finished = [h for h in self.heartbeats.values() if h.phase == "finished"]
        return len(finished) == self.processes and not self.alive

    @property
    def failed_s(self) -> float:
        """Seconds since the driver saw the first rank fail; 0 if none has failed."""
        return 0.0 if self._failed_at is None else time.monotonic() - self._failed_at

    @property
    def alive(self) -> list[int]:
        """Ranks that are running on this machine."""
        return [
            rank
            for rank, h in sorted(self.heartbeats.items())
            if h.pid is not None and _status(h.pid) == "running"
        ]

    @property
    def stuck(self) -> bool:
        """Whether no rank has made progress for the allowed time."""
        if self._hang_timeout_s is None:
            return False
        allowed = self._hang_timeout_s if self.heartbeats else max(self._hang_timeout_s, STARTUP_S)
        return time.monotonic() - self._progressed > allowed

    def describe(self) -> str:
        """The rank that is behind, its phase and since when; then one line for each rank."""
        silent = [f"rank {rank}" for rank in range(self.processes) if rank not in self.heartbeats]
        order = sorted(self.heartbeats.values(), key=lambda h: (h.marks, h.ticks, h.progressed))
        first = (
            f"{', '.join(silent)} did not start"
            if silent
            else f"rank {order[0].rank} is behind, in {order[0]}"
        )
        lines = [
            f"  rank {rank}: {heartbeat}{_state(heartbeat.pid)}"
            for rank, heartbeat in sorted(self.heartbeats.items())
        ]
        return "\n".join([first, *lines])

    def request_stacks(self) -> None:
        """Make every rank print the stacks of its threads into the log."""
        for rank in self.alive:
            self.send(rank, signal.SIGUSR1)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank on this machine, unless it has just ended."""
        pid = self.heartbeats[rank].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _status(pid: int | None) -> int | str:
    """The exit status of a process that its parent has not reaped yet, else "running" or "gone"."""
    try:
        if pid is None or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return "running"
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
        return os.waitstatus_to_exitcode(status)
    except (psutil.NoSuchProcess, OSError):
        return "gone"


def _state(pid: int | None) -> str:
    try:
        stopped = pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return ", its process has ended"
    return ", its process is stopped" if stopped else ""
