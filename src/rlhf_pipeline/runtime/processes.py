"""Identify processes, and kill what a launch has left running."""

from __future__ import annotations

import os

import psutil

DRIVER = "RLHF_DRIVER"
"""Environment variable with the identity of the process that launched this program."""

LAUNCH = "RLHF_LAUNCH"
"""Environment variable with driver and work directory. All processes of a launch have it, even
those that left its process group."""


def process_identity(pid: int) -> str | None:
    """An identity that is never reused on this machine: `pid@birth`. None: no such process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{pid}@{process.create_time()}"
    except psutil.NoSuchProcess:
        return None


def kill_strays(launch: str, *, except_group: int | None = None) -> None:
    """Kill the processes of a launch wherever they run, for example a worker in its own session."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH) == launch and os.getpgid(process.pid) != except_group:
                process.kill()
        except (psutil.Error, OSError):
            continue  # the process belongs to another user or has ended
