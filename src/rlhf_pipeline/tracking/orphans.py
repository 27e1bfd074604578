"""Runs that nobody ended: their driver was killed, or the store was out of reach at that moment.

A run carries the tag `rlhf.driver`: host, container, process and its birth. What is still RUNNING when that process is gone
is ended by the next `kedro run` on the same host: as KILLED, or as what its driver noted when it could not tell the store.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.runtime.processes import process_identity
from rlhf_pipeline.stages.events import Status
from rlhf_pipeline.tracking.store import ARTIFACTS

if TYPE_CHECKING:
    from mlflow import MlflowClient

DRIVER_TAG = "rlhf.driver"
NOTES = "untold.jsonl"


def driver_tag() -> str:
    """Who this process is, on all machines and for all time."""
    return f"{_host()} {process_identity(os.getpid())}"


def _host() -> str:
    """The host and its space of process ids: containers that share a name do not see each other's processes."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def note_end(project: Path, run_id: str, status: Status, time_ms: int) -> None:
    """Remember how a run of this process ended, which the store cannot be told now. On a full disk it is not remembered."""
    note = {"run": run_id, "driver": driver_tag(), "status": status, "time_ms": time_ms}
    with suppress(OSError):
        (project / ARTIFACTS).mkdir(exist_ok=True)
        with (project / ARTIFACTS / NOTES).open("a") as file:
            file.write(json.dumps(note) + "\n")


def end_orphans(client: MlflowClient, project: Path, experiment: str) -> None:
    """End this host's runs whose driver is gone."""
    notes = {(note["run"], note["driver"]): note for note in _notes(project / ARTIFACTS / NOTES)}
    running = f"tags.`{DRIVER_TAG}` LIKE '{_host()} %' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment], running):
        driver = run.data.tags[DRIVER_TAG]
        identity = driver.rpartition(" ")[2]
        if process_identity(int(identity.partition("@")[0])) != identity:
            note = notes.get((run.info.run_id, driver), {"status": "KILLED", "time_ms": None})
            client.set_terminated(run.info.run_id, note["status"], note["time_ms"])


def _notes(file: Path) -> list[dict[str, str]]:
    """The whole lines: a full disk may have left half of one."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
