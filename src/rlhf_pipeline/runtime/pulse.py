"""The driver's pulse: a file by which the ranks of several machines see that the driver is there.

    heartbeats/driver.json   a `Beat`; rewritten once a second

The work directory must lie on a file system that the machines share. A rank ends itself if the
driver ends the launch, has started another one, or falls silent: its machine is lost, or the file
system is. The driver passes signals to the ranks in the same way.
"""

import faulthandler
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import FOLDER

NAME = "driver.json"
PULSE = "RLHF_PULSE"
"""Environment variable of ranks that follow the pulse: the launch, and seconds of silence."""
EVERY_S = 1.0


@dataclass(frozen=True)
class Beat:
    """The state of a launch, as its driver sees it."""

    launch: str
    """A number that no other launch has: who reads it shares the driver's files."""
    plan: dict[str, Any]
    """What a machine needs to start a rank, see `stages.launch.start_rank`."""
    number: int = 0
    signals: list[int] = field(default_factory=list)
    """Signals for all ranks on other machines, in order."""
    ended: bool = False


class Pulse:
    """The driver's side: write the file as long as the launch runs.

    Args:
        directory: the work directory.
        timeout_s: seconds of silence after which ranks and driver count each other as lost.
        plan: see `Beat`.
    """

    def __init__(self, directory: Path, timeout_s: float, plan: dict[str, Any]) -> None:
        self.timeout_s = timeout_s
        self.launch = secrets.token_hex(8)
        self._file = directory / FOLDER / NAME
        self._beat = Beat(self.launch, plan)
        self._changing = threading.Lock()
        self._ended = threading.Event()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Keep the ranks alive inside the block, and end them after it."""
        self._file.parent.mkdir(exist_ok=True)
        self._write()
        threading.Thread(target=self._repeat, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            with suppress(OSError):  # the disk is full: the ranks miss the pulse instead
                self._write(ended=True)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks on other machines."""
        self._write(signals=[*self._beat.signals, int(number)])

    def _repeat(self) -> None:
        while not self._ended.wait(EVERY_S):
            with suppress(OSError):  # as above
                self._write()

    def _write(self, **changes: Any) -> None:
        with self._changing:
            ended = self._beat.ended  # the thread must not revive an ended launch
            self._beat = replace(self._beat, number=self._beat.number + 1, **changes)
            if not ended:
                write_atomically(self._file, json.dumps(asdict(self._beat)), force=False)


def read_beat(directory: Path) -> Beat | None:
    """The newest beat; None if there is none, or it cannot be read now."""
    with suppress(OSError):
        return Beat(**json.loads((directory / FOLDER / NAME).read_text()))
    return None


def follow(directory: Path) -> None:
    """Obey the driver's pulse in a thread, if this rank belongs to a launch on several machines."""
    if PULSE in os.environ:
        launch, timeout_s = os.environ[PULSE].split()
        arguments = (directory, launch, float(timeout_s))
        threading.Thread(target=_follow, args=arguments, daemon=True).start()


def _follow(directory: Path, launch: str, timeout_s: float) -> None:
    number = obeyed = 0
    while True:
        beat = read_beat(directory)
        if beat is not None and (beat.launch != launch or beat.ended):
            _end()
        if beat is not None and beat.number != number:
            number = beat.number
            # Ends this process even if reading from a lost file system never returns.
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            for each in beat.signals[obeyed:]:
                os.kill(os.getpid(), each)
            obeyed = len(beat.signals)
        time.sleep(EVERY_S)


def _end() -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(1)
