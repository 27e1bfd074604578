"""The driver's pulse: a file by which the ranks of several machines see that the driver is there.

    heartbeats/driver.json   {"launch": ..., "number": 7, "ended": false, "plan": {...}}

The driver rewrites it once a second, in the work directory, which lies on a file system that the
machines share. A rank ends itself if the driver ends the launch, has started another one, or falls
silent: its machine is lost, or the file system is.
"""

import faulthandler
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import FOLDER, LAUNCH, process_identity

NAME = "driver.json"
PULSE = "RLHF_PULSE"
"""Environment variable of ranks that follow the pulse: the launch, and seconds of silence."""
EVERY_S = 1.0


class Pulse:
    """The driver's side: write the file as long as the launch runs.

    Args:
        directory: the work directory.
        timeout_s: seconds of silence after which ranks and driver count each other as lost.
        plan: what a machine needs to start a rank, see `stages.launch.start_rank`.
    """

    def __init__(self, directory: Path, timeout_s: float, plan: Mapping[str, Any]) -> None:
        self.timeout_s = timeout_s
        self.launch = secrets.token_hex(8)
        """A number that no other launch has: who reads it in the file shares the driver's files."""
        self._file = directory / FOLDER / NAME
        self._plan = plan
        self._number = 0

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Keep the ranks alive inside the block, and end them after it."""
        self._file.parent.mkdir(exist_ok=True)
        self._write()
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(EVERY_S):
                with suppress(OSError):  # as below
                    self._write()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):  # the disk is full: the ranks miss the pulse instead
                self._write(ended=True)

    def _write(self, *, ended: bool = False) -> None:
        self._number += 1
        beat = {"launch": self.launch, "number": self._number, "ended": ended, "plan": self._plan}
        write_atomically(self._file, json.dumps(beat), force=False)


def read_beat(directory: Path) -> dict[str, Any]:
    """The newest state of a launch as its driver wrote it; empty if it cannot be read now."""
    with suppress(OSError):
        beat: dict[str, Any] = json.loads((directory / FOLDER / NAME).read_text())
        return beat
    return {}


def follow(directory: Path) -> None:
    """End this process with its driver, which a thread follows: by its pulse, if ranks on other
    machines do so, else by its process. The driver's guard can be killed with it."""
    if PULSE in os.environ:
        launch, timeout_s = os.environ[PULSE].split()
        arguments = (directory, launch, float(timeout_s))
        threading.Thread(target=_follow, args=arguments, daemon=True).start()
    elif LAUNCH in os.environ:
        driver = os.environ[LAUNCH].partition(" ")[0]
        threading.Thread(target=_follow_process, args=(driver,), daemon=True).start()


def _follow_process(driver: str) -> None:
    pid = int(driver.partition("@")[0])
    while process_identity(pid) == driver:
        time.sleep(EVERY_S)
    _end()


def _end() -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(1)


def _follow(directory: Path, launch: str, timeout_s: float) -> None:
    beat: dict[str, Any] = {}
    while True:
        # Ends this process even if reading from a lost file system never returns.
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        before = beat
        while beat in ({}, before):
            time.sleep(EVERY_S)
            beat = read_beat(directory)
            if beat and (beat["launch"] != launch or beat["ended"]):
                _end()
