"""The progress of each rank as a small file, so that the driver can name a stuck rank.

    heartbeats/rank0.json   a `Heartbeat`; rewritten when a phase begins, or once a second

A program calls `at` when a phase begins and `tick` when a piece of it is done. Both change memory
only. A thread writes the file, so training never waits for a disk and no rank waits for another.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf_pipeline.runtime.files import write_atomically

FOLDER = "heartbeats"
LAUNCH = "RLHF_LAUNCH"
"""Environment variable with driver and work directory. All processes of a launch have it, even
those that left its process group; programs started by hand or on another machine do not."""
WRITE_EVERY_S, PAUSE_S = 1.0, 0.1
"""Seconds between two writes: within a phase, and of two short phases."""

Phase = Literal["loading", "rollout", "scoring", "update", "evaluation", "saving", "finished"]


@dataclass(frozen=True)
class Heartbeat:
    """The progress of one rank."""

    rank: int
    pid: int | None
    """Its process id if the driver runs on the same machine, else None."""
    phase: Phase = "loading"
    step: int | None = None
    """The training step, from 1."""
    since: float = 0.0
    """When the phase began, seconds since 1970."""
    progressed: float = 0.0
    """When the rank last made progress, seconds since 1970."""
    marks: int = 0
    """Phases begun so far. All ranks run the same phases, so the rank with the fewest is behind."""
    ticks: int = 0
    """Pieces done in this phase."""
    longest_row: int = 0
    """Tokens of the longest row of any micro batch so far."""
    scorer: str = ""
    """The reward or the judge that scores; empty in other work."""

    def __str__(self) -> str:
        by = f" by {self.scorer}" if self.scorer else ""
        step = "" if self.step is None else f" of step {self.step}"
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.phase}{by}{step} since {since}"


_here = Heartbeat(rank=0, pid=None)
_file: Path | None = None
_writing = threading.Lock()
_begun = threading.Event()


def start(directory: Path, rank: int) -> None:
    """Start to report into a work directory, in phase `loading`."""
    global _here, _file
    pid, now = os.getpid() if LAUNCH in os.environ else None, time.time()
    _here = Heartbeat(rank, pid, since=now, progressed=now)
    _file = directory / FOLDER / f"rank{rank}.json"
    _file.parent.mkdir(exist_ok=True)
    _write(_file, _here)
    threading.Thread(target=_report, args=(_file, _here), daemon=True).start()


def at(phase: Phase, step: int | None = None) -> None:
    """Begin a phase. All ranks call this in the same order. None: the step does not change."""
    global _here
    now = time.time()
    _here = replace(
        _here,
        phase=phase,
        step=step or _here.step,
        since=now,
        progressed=now,
        marks=_here.marks + 1,
        ticks=0,
        scorer="",
    )
    _begun.set()
    if phase == "finished":
        flush()


def tick() -> None:
    """Report that a piece of the phase is done: a micro batch, a token of each response, a file."""
    global _here
    _here = replace(_here, progressed=time.time(), ticks=_here.ticks + 1)


@contextmanager
def scored_by(scorer: str) -> Iterator[None]:
    """Report the reward or the judge that scores inside the block; after an error it stays."""
    global _here
    _here = replace(_here, scorer=scorer)
    yield
    _here = replace(_here, scorer="")


def row(tokens: int) -> None:
    """Report the longest row of a micro batch. Memory for it is needed at any micro batch size."""
    global _here
    _here = replace(_here, longest_row=max(_here.longest_row, tokens))


def flush() -> None:
    """Write the file now."""
    if _file is not None:
        _write(_file, _here)


@contextmanager
def while_writing(folder: Path) -> Iterator[None]:
    """Tick while a library writes files into a folder inside the block: once a second.

    A write that hangs does not tick.
    """
    done = threading.Event()

    def watch() -> None:
        before = _occupied(folder)
        while not done.wait(WRITE_EVERY_S):
            now = _occupied(folder)
            if now != before:
                tick()
            before = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def read_heartbeats(directory: Path) -> dict[int, Heartbeat]:
    """The newest heartbeat of each rank that has reported, by rank."""
    found = (
        Heartbeat(**json.loads(path.read_text()))
        for path in sorted((directory / FOLDER).glob("rank*.json"))
    )
    return {heartbeat.rank: heartbeat for heartbeat in found}


def _occupied(folder: Path) -> dict[str, int]:
    """Blocks on the disk of each file in a folder. safetensors reserves the size beforehand."""
    blocks = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it was renamed
            blocks[path.name] = path.stat().st_blocks
    return blocks


def _report(path: Path, written: Heartbeat) -> None:
    while True:
        time.sleep(PAUSE_S)
        _begun.wait(WRITE_EVERY_S)  # a rank that is killed has left the phase that it was in
        _begun.clear()
        newest = _here
        if newest is not written:
            with suppress(OSError):  # a full disk must fail where results are written, not here
                _write(path, newest)
                written = newest


def _write(path: Path, heartbeat: Heartbeat) -> None:
    with _writing:
        write_atomically(path, json.dumps(asdict(heartbeat)), force=False)
