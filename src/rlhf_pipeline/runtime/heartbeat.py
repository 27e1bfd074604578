"""The progress of each rank as a small file, so that the driver can name a stuck rank.

    heartbeats/rank0.json   a `Heartbeat`; rewritten when a phase begins, and once a second

A program calls `begin_phase`, and `report_progress` when a piece of a phase is done. Both change
memory only. A thread writes the file, so training waits for no disk and no rank for another.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_pipeline.runtime.files import write_atomically

FOLDER = "heartbeats"
LAUNCH = "RLHF_LAUNCH"
"""Environment variable with driver and work directory. All processes of a launch have it, even
those that left its process group; programs started by hand do not."""
WRITE_EVERY_S, PAUSE_S = 1.0, 0.1
"""Seconds between two writes: within a phase, and of two short phases."""

Phase = Literal[
    "loading", "rollout", "scoring", "update", "evaluation", "saving",
    "finished", "interrupted", "failed",
]  # fmt: skip
ENDS = ("finished", "interrupted", "failed")
"""Phases of a rank whose process ends: all its work is done, it obeyed SIGTERM, or it left its
reason in a report."""


@dataclass(frozen=True)
class Heartbeat:
    """The progress of one rank."""

    rank: int
    pid: int | None
    """Its process id; None for a program that was started by hand."""
    phase: Phase = "loading"
    step: int | None = None
    """The training step, from 1."""
    since: float = 0.0
    """When the phase began, seconds since 1970."""
    progressed: float = 0.0
    """When the rank last made progress, seconds since 1970."""
    phases: int = 0
    """Phases begun so far. All ranks run the same phases, so the rank with the fewest is behind."""
    pieces: int = 0
    """Pieces done in this phase."""
    sequence: int = field(default=0, compare=False)
    """Number of this report: a rank that waits makes no progress, but it reports."""
    machine: str = ""
    """Where the process runs, see `machine`."""
    scorer: str = ""
    """The reward or the judge that scores; empty in other work."""
    peak: int = 0
    """Bytes that it held at most, known when its process ends, see `peak_memory`."""

    def __str__(self) -> str:
        by = f" by {self.scorer}" if self.scorer else ""
        step = "" if self.step is None else f" of step {self.step}"
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.phase}{by}{step} since {since}"


_here = Heartbeat(rank=0, pid=None)
_file: Path | None = None
_writes = 0
_writing, _changing = threading.Lock(), threading.Lock()
_begun = threading.Event()


def machine() -> str:
    """Host and process namespace: containers with equal names do not see each other's processes."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def process_identity(pid: int) -> str | None:
    """`pid@birth`, which no other process has until the machine starts again; None: it has ended.
    The birth is in ticks since the machine started, so no step of the clock changes it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # those after the name, from the third one
    return None if fields[0] in "ZX" else f"{pid}@{fields[19]}"


def peak_memory() -> int:
    """Bytes that this process held at most: of its GPU, or else of main memory.

    Main memory contains the pages of files that are mapped, such as those of libraries.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * next(peaks, 0)  # some sandboxes do not tell


def start(directory: Path, rank: int) -> None:
    """Start to report into a work directory, in phase `loading`."""
    global _here, _file
    pid, now = os.getpid() if LAUNCH in os.environ else None, time.time()
    _here = Heartbeat(rank, pid, since=now, progressed=now, machine=machine())
    _file = directory / FOLDER / f"rank{rank}.json"
    _file.parent.mkdir(exist_ok=True)
    _write(_file)
    threading.Thread(target=_report, args=(_file,), daemon=True).start()


def begin_phase(phase: Phase, step: int | None = None) -> None:
    """Begin a phase. All ranks call this in the same order. None: the step does not change."""
    step, phases = step or _here.step, _here.phases + 1
    peak = peak_memory() if phase in ENDS else 0
    now = time.time()
    _progress(phase=phase, step=step, since=now, phases=phases, pieces=0, scorer="", peak=peak)
    _begun.set()
    if phase in ENDS and _file is not None:
        _write(_file)


def report_progress() -> None:
    """Report that a piece of the phase is done: a micro batch, a token of each response, a file."""
    _progress(pieces=_here.pieces + 1)


@contextmanager
def scored_by(scorer: str) -> Iterator[None]:
    """Report the reward or the judge that scores inside the block; after an error it stays."""
    _progress(scorer=scorer)
    yield
    _progress(scorer="")


def _progress(**changes: Any) -> None:
    global _here
    with _changing:  # rewards report from threads of their own
        _here = replace(_here, progressed=time.time(), **changes)


def read_heartbeats(directory: Path) -> dict[int, Heartbeat]:
    """The newest heartbeat of each rank that has reported and can be read now, by rank."""
    found = {}
    for path in sorted((directory / FOLDER).glob("rank*.json")):
        with suppress(OSError):  # on a network file system, it is being replaced
            heartbeat = Heartbeat(**json.loads(path.read_text()))
            found[heartbeat.rank] = heartbeat
    return found


def _report(path: Path) -> None:
    while True:
        time.sleep(PAUSE_S)
        _begun.wait(WRITE_EVERY_S)  # a rank that is killed has left the phase that it was in
        _begun.clear()
        with suppress(OSError):  # a full disk must fail where results are written, not here
            _write(path)


def _write(path: Path) -> None:
    global _writes
    with _writing:  # two threads write, and the newest progress must come last
        _writes += 1
        write_atomically(path, json.dumps(asdict(replace(_here, sequence=_writes))), force=False)
