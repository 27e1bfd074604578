"""The ranks of a launch as the driver sees them: their progress, and which of them ended too early.

All ranks write files. The driver sees the processes of this machine, and the silence of the others.
It checks the ranks itself: DeepSpeed's launcher does so once a second, and returns the exit code of
the first failed rank that it meets, which may have failed only because a peer was lost.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf_pipeline.runtime.heartbeat import ENDS, Heartbeat, machine, read_heartbeats
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.runtime.pulse import Pulse

ALIVE = ("running", "stopped")
STATES: dict[int | str, str] = {
    "stopped": ", its process is stopped",
    "gone": ", its process has ended",
}
STARTUP_S = 300.0  # the ranks have at least this time for their first report, after imports


@dataclass(frozen=True)
class Death:
    """A rank that ended before its work was done, and left no reason."""

    heartbeat: Heartbeat  # the last one of the rank
    seen: float  # when the driver saw the death, seconds since 1970
    status: int | None
    """The exit code, or the negative number of the signal that ended the rank. None: unknown."""


class Ranks:
    """Follows the ranks through the files they write and the kernel's table of processes.

    The ranks count as stuck after `hang_timeout_s` seconds without progress. They follow the
    `pulse` if some are on other machines.
    """

    def __init__(
        self, directory: Path, processes: int, hang_timeout_s: float | None, pulse: Pulse | None
    ) -> None:
        self._directory = directory
        self._hang_timeout_s = hang_timeout_s
        self.pulse = pulse
        self.processes = processes
        self.heartbeats: dict[int, Heartbeat] = {}
        self.deaths: dict[int, Death] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        """The number of each rank's newest report, and when the driver has first seen it."""
        self._progressed = time.monotonic()
        self._failed_at: float | None = None

    def update(self) -> None:
        """Read heartbeats, reports and the table of processes; called several times a second."""
        ended = {
            rank: status
            for rank in self.heartbeats
            if rank not in self.deaths and (status := self.status(rank)) not in ALIVE
        }
        self.read()  # after the table of processes: a rank writes a last heartbeat before it ends
        reports = (self._directory / ERRORS).glob("*.txt")
        reported = {int(report.stem.rpartition("-rank")[2]) for report in reports}
        for rank, status in ended.items():
            heartbeat = self.heartbeats[rank]
            if heartbeat.phase not in ENDS and rank not in reported:
                known = None if isinstance(status, str) else status
                self.deaths[rank] = Death(heartbeat, time.time(), known)
        if reported or self.deaths:
            self.fail()

    def fail(self) -> None:
        """Remember when the launch has failed, the first time."""
        self._failed_at = self._failed_at or time.monotonic()

    def read(self) -> list[int]:
        """Read the heartbeats, without judging what has ended; return the ranks that are alive."""
        newest, now = self.heartbeats | read_heartbeats(self._directory), time.monotonic()
        for rank, heartbeat in newest.items():
            if rank not in self._beats or self._beats[rank][0] != heartbeat.sequence:
                self._beats[rank] = heartbeat.sequence, now
        if newest != self.heartbeats:
            self.heartbeats, self._progressed = newest, now
        return self.alive

    @property
    def finished(self) -> bool:
        finished = [h for h in self.heartbeats.values() if h.phase == "finished"]
        return len(finished) == self.processes and not self.alive

    @property
    def failed_s(self) -> float:
        return 0.0 if self._failed_at is None else time.monotonic() - self._failed_at

    @property
    def alive(self) -> list[int]:
        """Ranks that are running. Those of a program started by hand are unknown."""
        known = [rank for rank, heartbeat in self.heartbeats.items() if heartbeat.pid is not None]
        return [rank for rank in sorted(known) if self.status(rank) in ALIVE]

    @property
    def lost(self) -> str | None:
        """The machine of which no rank reports any more; None if there is none."""
        ranks_of: dict[str, list[int]] = {}
        for rank, heartbeat in sorted(self.heartbeats.items()):
            if not self._is_here(rank) and heartbeat.phase not in ENDS:
                ranks_of.setdefault(heartbeat.machine, []).append(rank)
        for where, ranks in ranks_of.items():
            if self.pulse is not None and all(map(self._is_silent, ranks)):
                lost = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                return (
                    f"node {where.partition('/')[0]} ({lost}) is lost: it has been silent for "
                    f"{self.pulse.timeout_s:g} s (launch.node_timeout_s)"
                )
        return None

    def status(self, rank: int) -> int | str:
        """The exit status of a rank, as far as known, else "running", "stopped" or "gone"."""
        heartbeat = self.heartbeats[rank]
        if not self._is_here(rank):
            return "gone" if heartbeat.phase in ENDS or self._is_silent(rank) else "running"
        if heartbeat.pid is None:
            return "running"
        try:
            state = psutil.Process(heartbeat.pid).status()
            if state != psutil.STATUS_ZOMBIE:
                return "stopped" if state == psutil.STATUS_STOPPED else "running"
            # The parent, which gets the exit status, has not asked for it yet.
            fields = Path(f"/proc/{heartbeat.pid}/stat").read_text().rpartition(")")[2].split()
            return os.waitstatus_to_exitcode(int(fields[-1]))
        except (psutil.NoSuchProcess, OSError):
            return "gone"

    def _is_here(self, rank: int) -> bool:
        return self.heartbeats[rank].machine in ("", machine())

    def _is_silent(self, rank: int) -> bool:
        since = self._beats[rank][1]
        return self.pulse is not None and time.monotonic() > since + self.pulse.timeout_s

    @property
    def stuck(self) -> bool:
        if self._hang_timeout_s is None:
            return False
        allowed_s = max(self._hang_timeout_s, 0 if self.heartbeats else STARTUP_S)
        return time.monotonic() - self._progressed > allowed_s

    def describe(self) -> str:
        """The rank that is behind, its phase and since when; then one line for each rank."""
        silent = [f"rank {rank}" for rank in range(self.processes) if rank not in self.heartbeats]
        if silent:
            first = f"{', '.join(silent)} did not start"
        else:
            last = min(self.heartbeats.values(), key=lambda h: (h.phases, h.pieces, h.progressed))
            first = f"rank {last.rank} is behind, in {last}"
        lines = [
            f"  rank {rank}: {heartbeat}{STATES.get(self.status(rank), '')}"
            for rank, heartbeat in sorted(self.heartbeats.items())
        ]
        return "\n".join([first, *lines])

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank unless it has just ended, or runs on another machine.

        SIGTERM reaches those by the agreement of all ranks at the end of a step.
        """
        pid = self.heartbeats[rank].pid
        with suppress(ProcessLookupError):
            if pid is not None and self._is_here(rank):
                os.kill(pid, number)
