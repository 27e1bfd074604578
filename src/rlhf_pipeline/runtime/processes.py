"""How the processes of one launch recognise each other, and how leftovers are killed."""

from __future__ import annotations

import os

import psutil

DRIVER = "RLHF_DRIVER"
"""Environment variable with the identity of the process that launched this program."""

LAUNCH = "RLHF_LAUNCH"
"""Environment variable shared by all processes of a launch, even those that left its process
group: driver and work directory."""


def process_identity(pid: int) -> str | None:
    """An identity that no other process of this machine ever has: `pid@birth`. None if it is gone."""
    try:
        process = psutil.Process(pid)
        return (
            None if process.status() == psutil.STATUS_ZOMBIE else f"{pid}@{process.create_time()}"
        )
    except psutil.NoSuchProcess:
        return None


def kill_strays(launch: str, *, except_group: int | None = None) -> None:
    """Kill the processes of a launch wherever they run, for example a worker in its own session."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH) == launch and os.getpgid(process.pid) != except_group:
                process.kill()
        except (psutil.Error, OSError):
            continue  # owned by another user, or gone
