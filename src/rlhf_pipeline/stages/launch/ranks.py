"""The ranks of a launch as the driver sees them: their progress, and which of them ended too early.

The ranks of this machine write files; agents report those of other nodes.

DeepSpeed's launcher checks the ranks once a second and returns the exit code of the first failed
rank that it meets, which may have failed only because a peer was lost. So the driver checks the
ranks itself, more often.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.launch.remote_node import RemoteNode

ALIVE = ("running", "stopped")
RESUME = "Run the same command again to resume; finished stages are kept"
STATES: dict[int | str, str] = {
    "stopped": ", its process is stopped",
    "gone": ", its process has ended",
}
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
    """Follows the ranks through the files they write and the kernel's table of processes.

    Args:
        directory: the work directory.
        own: the ranks on this machine.
        hang_timeout_s: seconds without progress after which the ranks count as stuck, or None.
        nodes: the other nodes.
    """

    def __init__(
        self,
        directory: Path,
        own: range,
        hang_timeout_s: float | None,
        nodes: Sequence[RemoteNode] = (),
    ) -> None:
        self._directory = directory
        self._own = own
        self._hang_timeout_s = hang_timeout_s
        self.nodes = nodes
        self._node_of = {rank: node for node in nodes for rank in node.ranks}
        self.processes = len(own) + len(self._node_of)
        self.heartbeats: dict[int, Heartbeat] = {}
        self.deaths: dict[int, Death] = {}
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
        found = read_heartbeats(self._directory)  # a shared folder contains those of all nodes
        newest = {rank: heartbeat for rank, heartbeat in found.items() if rank in self._own}
        for node in self.nodes:
            node.update()
            newest |= node.heartbeats
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
        """Ranks that are running. Those of a program started by hand are unknown."""
        return [
            rank
            for rank, heartbeat in sorted(self.heartbeats.items())
            if heartbeat.pid is not None and self.status(rank) in ALIVE
        ]

    @property
    def lost(self) -> str | None:
        """Why a node can no longer be reached; None while all can."""
        return next((node.lost for node in self.nodes if node.lost is not None), None)

    def raise_if_interrupted(self) -> None:
        """Raise Interrupted if a scheduler has sent a signal to an agent: its node may vanish."""
        for node in self.nodes:
            if node.interrupted is not None:
                raise Interrupted(f"{node.interrupted}. {RESUME}")

    @property
    def failed_node(self) -> RemoteNode | None:
        """A node on which DeepSpeed's launcher has failed."""
        return next((node for node in self.nodes if node.code), None)

    def status(self, rank: int) -> int | str:
        """The exit status of a rank, as far as known, else "running", "stopped" or "gone"."""
        node = self._node_of.get(rank)
        return _status(self.heartbeats[rank].pid) if node is None else node.status(rank)

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
            f"  rank {rank}: {heartbeat}{STATES.get(self.status(rank), '')}"
            for rank, heartbeat in sorted(self.heartbeats.items())
        ]
        return "\n".join([first, *lines])

    def request_stacks(self) -> None:
        """Make every rank print the stacks of its threads into the log."""
        for rank in self.alive:
            self.send(rank, signal.SIGUSR1)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, unless it has just ended."""
        pid = self.heartbeats[rank].pid
        if rank in self._node_of:
            self._node_of[rank].send(rank, number)
        elif pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _status(pid: int | None) -> int | str:
    """The exit status of a process that its parent has not reaped yet, else its state in a word."""
    try:
        state = psutil.STATUS_RUNNING if pid is None else psutil.Process(pid).status()
        if state != psutil.STATUS_ZOMBIE:
            return "stopped" if state == psutil.STATUS_STOPPED else "running"
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
        return os.waitstatus_to_exitcode(status)
    except (psutil.NoSuchProcess, OSError):
        return "gone"
