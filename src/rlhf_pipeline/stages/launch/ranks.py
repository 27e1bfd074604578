"""The ranks of a launch as the driver sees them: where they are, and which ended before its work was done.

DeepSpeed's launcher looks once a second and passes on the exit code of whichever failed rank it meets first, a rank that
missed another one's answer, say. So the driver looks for itself, more often.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats
from rlhf_pipeline.runtime.program import ERRORS

STARTUP_S = 300.0
"""Seconds that the ranks have to report for the first time, whatever the watchdog's patience: imports come before."""


@dataclass(frozen=True)
class Death:
    """A rank that ended before its work was done, and left no reason."""

    heartbeat: Heartbeat
    """The last."""
    seen: float
    """When the driver saw it, seconds since 1970."""
    status: int | None
    """Its exit code, or the negative number of the signal that ended it. None: not known."""


class Ranks:
    """Watches the ranks through the files they write and through the kernel's table of processes."""

    def __init__(self, directory: Path, processes: int, hang_timeout_s: float | None) -> None:
        self._directory = directory
        self._processes = processes
        self._hang_timeout_s = hang_timeout_s
        self.heartbeats: dict[int, Heartbeat] = {}
        self.deaths: dict[int, Death] = {}
        self._progressed = time.monotonic()
        self._failed_at: float | None = None

    def look(self) -> None:
        """Bring everything up to date; called several times a second."""
        ended = {
            rank: status
            for rank, heartbeat in self.heartbeats.items()
            if rank not in self.deaths and (status := _status(heartbeat.pid)) != "running"
        }
        newest = read_heartbeats(self._directory)  # after that: a rank's last words precede its end
        if newest != self.heartbeats:
            self.heartbeats, self._progressed = newest, time.monotonic()
        reported = self._reported()
        for rank, status in ended.items():
            if newest[rank].phase != "finished" and rank not in reported:
                known = None if isinstance(status, str) else status
                self.deaths[rank] = Death(newest[rank], time.time(), known)
        if self._failed_at is None and (reported or self.deaths):
            self._failed_at = time.monotonic()

    @property
    def failed_s(self) -> float:
        """Seconds since a rank was first seen to fail; 0 while none has."""
        return 0.0 if self._failed_at is None else time.monotonic() - self._failed_at

    @property
    def alive(self) -> list[int]:
        """Ranks that are at work on this machine."""
        return [
            rank
            for rank, h in sorted(self.heartbeats.items())
            if h.pid is not None and _status(h.pid) == "running"
        ]

    @property
    def stuck(self) -> bool:
        """Whether no rank has got on for the time allowed."""
        if self._hang_timeout_s is None:
            return False
        allowed = self._hang_timeout_s if self.heartbeats else max(self._hang_timeout_s, STARTUP_S)
        return time.monotonic() - self._progressed > allowed

    def whereabouts(self) -> str:
        """Which rank is behind, in what, since when; then all ranks, a line each."""
        silent = [f"rank {rank}" for rank in range(self._processes) if rank not in self.heartbeats]
        order = sorted(self.heartbeats.values(), key=lambda h: (h.marks, h.ticks, h.progressed))
        first = (
            f"{', '.join(silent)} never began"
            if silent
            else f"rank {order[0].rank} is behind, in {order[0]}"
        )
        lines = [
            f"  rank {rank}: {heartbeat}{_state(heartbeat.pid)}"
            for rank, heartbeat in sorted(self.heartbeats.items())
        ]
        return "\n".join([first, *lines])

    def ask_for_stacks(self) -> None:
        """Have every rank print what its threads are doing, into the log."""
        for rank in self.alive:
            os.kill(self.heartbeats[rank].pid or 0, signal.SIGUSR1)

    def _reported(self) -> set[int]:
        names = [
            path.stem.rpartition("-rank")[2] for path in (self._directory / ERRORS).glob("*.txt")
        ]
        return {int(name) for name in names}


def _status(pid: int | None) -> int | str:
    """ "running", how it ended (`Death.status`) as long as its parent has not asked, or "gone"."""
    try:
        if pid is None or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return "running"
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
        return os.waitstatus_to_exitcode(status)
    except (psutil.NoSuchProcess, OSError):
        return "gone"


def _state(pid: int | None) -> str:
    try:
        return (
            ", its process is stopped"
            if pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
            else ""
        )
    except psutil.NoSuchProcess:
        return ", its process is gone"
