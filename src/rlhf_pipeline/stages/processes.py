"""Identify processes, and end those of a launch, even if the driver is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from rlhf_pipeline.runtime.heartbeat import LAUNCH, machine, process_identity


def this_process() -> str:
    """The identity of this process among all processes of all machines."""
    return f"{machine()} {process_identity(os.getpid())}"


def may_run(process: str, since: float) -> bool:
    """Whether a process, given by its `this_process` at the time `since`, may still run.

    A process of another machine or container cannot be seen. It counts as running for 30 days.
    """
    where, _, identity = process.rpartition(" ")
    if where != machine():
        return time.time() - since < 30 * 24 * 3600
    return process_identity(int(identity.partition("@")[0])) == identity


def kill_launch(launch: str) -> None:
    """Kill the processes of a launch, for example a worker in its own session, and their groups.

    `launch` is the value of the variable `LAUNCH`, or its end: a blank and a work directory stand
    for every launch there. A child in a group may have another environment.
    """
    found = []
    for _ in range(2):  # a process may have started another one meanwhile
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it belongs to another user or has ended
                if process.environ().get(LAUNCH, "").endswith(launch):
                    found.append(process.pid)
                    os.killpg(os.getpgid(process.pid), signal.SIGKILL)
    deadline = time.monotonic() + 5  # killed processes have this time to disappear
    while any(process_identity(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)


def start(
    command: list[str], environment: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with SIGTERM blocked until it unblocks the signal.

    A scheduler sends SIGTERM to every process of a job. It must not end a guard, nor DeepSpeed's
    launcher, which would kill the ranks after 30 seconds. `options` are those of `Popen`.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(command, start_new_session=True, env=environment, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def guarded(launch: str, python_path: str, folder: str = "") -> Iterator[None]:
    """Kill the processes of a launch at the end of the block or of this process, even by SIGKILL.

    Otherwise ranks would continue to train and write into the directory of the next attempt. Then
    remove a temporary folder.
    """
    command = [sys.executable, "-P", "-m", __name__, launch, folder]
    environment = os.environ | {"PYTHONPATH": python_path}
    # Leaving the block closes the guard's input, as the end of this process does.
    with start(command, environment, stdin=subprocess.PIPE):
        yield


if __name__ == "__main__":
    sys.stdin.read()
    kill_launch(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
