"""Orphaned runs: MLflow says RUNNING, but the driver is gone.

The driver was killed, or the store failed when a run ended. Each run has the tag `rlhf.driver`:
host, process namespace, process id and start time. The next `kedro run` on the same host closes
orphaned runs as KILLED, or with the status that their driver saved.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.runtime.heartbeat import machine
from rlhf_pipeline.stages.events import Status
from rlhf_pipeline.stages.processes import may_run, this_process
from rlhf_pipeline.tracking.store import ARTIFACTS, DRIVER_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

UNSENT = "unsent_ends.jsonl"
"""File of the ends that the store does not have."""


def save_end(project: Path, run_id: str, status: Status, time_ms: int) -> None:
    """Save how a run of this process ended, for the next driver; do nothing if the disk is full."""
    end = {"run": run_id, "driver": this_process(), "status": status, "time_ms": time_ms}
    with suppress(OSError):
        (project / ARTIFACTS).mkdir(exist_ok=True)
        with (project / ARTIFACTS / UNSENT).open("a") as file:
            file.write("\n" + json.dumps(end))  # a full disk may have cut the line before


def close_orphans(client: "MlflowClient", project: Path, experiment: str) -> None:
    """Close the runs of this host whose driver is gone."""
    ends = {(end["run"], end["driver"]): end for end in _saved_ends(project)}
    running = f"tags.`{DRIVER_TAG}` LIKE '{machine()} %' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment], running):
        driver = run.data.tags[DRIVER_TAG]
        if not may_run(driver, run.info.start_time / 1000):
            end = ends.get((run.info.run_id, driver), {"status": "KILLED", "time_ms": None})
            client.set_terminated(run.info.run_id, end["status"], end["time_ms"])


def _saved_ends(project: Path) -> Iterator[dict[str, Any]]:
    file = project / ARTIFACTS / UNSENT
    for line in file.read_text().splitlines() if file.is_file() else []:
        with suppress(ValueError):  # an empty or incomplete line
            yield json.loads(line)
