"""Start one rank of a launch on several machines: check its machine, then become its program.

    python -P start_rank.py DIRECTORY LAUNCH SECONDS

DeepSpeed's launchers, `srun`, `mpirun` and `torchrun` run this file. They number the ranks in
different variables, and start them with the environment of their own machine.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlhf_pipeline.runtime.program import RENDEZVOUS, write_report
from rlhf_pipeline.runtime.pulse import EVERY_S, PULSE, read_beat
from rlhf_pipeline.stages.cache.fingerprint import code_of_package, library_version
from rlhf_pipeline.stages.job import TRAINING_LIBRARIES
from rlhf_pipeline.stages.launch.resources import search_path

FAULT = "cannot start: "
"""Begins the line that a rank writes into the log if it cannot start."""
NUMBERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables with a rank's number, its number on its machine, and the number of ranks, as
DeepSpeed's launcher and torchrun, Open MPI, MPICH, and SLURM name them. The first row that is set
counts: `mpirun` and `torchrun` may themselves run under SLURM."""


def installation() -> dict[str, str]:
    """What must be equal on all machines: Python, the code and the libraries."""
    python = ".".join(map(str, sys.version_info[:2]))
    versions = {name: library_version(name) for name in TRAINING_LIBRARIES}
    return {"python": python, "code": code_of_package()[:12], **versions}


def main(directory: Path, launch: str, timeout_s: float) -> NoReturn:
    """Replace this process by the rank's program, or exit with the reason why that cannot be."""
    host = socket.gethostname()
    deadline = time.monotonic() + timeout_s  # a file system may show the files seconds later
    while (beat := read_beat(directory)).get("launch") != launch:
        if time.monotonic() > deadline:
            sys.exit(
                f"{FAULT}{host} does not see the driver's files in {directory}. Fix: set root to a "
                "folder on a file system that all machines share, under the same path"
            )
        time.sleep(EVERY_S)
    plan = beat["plan"]
    rows = [row for row in NUMBERS if os.environ.keys() >= {*row[:2]}]
    if not rows:
        names = " or ".join(f"{rank} and {local_rank}" for rank, local_rank, _ in NUMBERS)
        sys.exit(f"{FAULT}found no number of this rank, expected {names} in the environment")
    rank, local_rank, count = (os.environ.get(name, "") for name in rows[0])
    if (fault := _fault(plan, count, is_first=int(local_rank) == 0)) is not None:
        write_report(directory, int(rank), f"{host}: {fault}")
        sys.exit(f"{FAULT}{host}: {fault}")
    environment = {
        **plan["defaults"],
        **os.environ,
        **plan["settings"],
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "PATH": search_path(),
        PULSE: f"{launch} {timeout_s:g}",
    }
    environment.pop(RENDEZVOUS, None)
    os.chdir(plan["folder"])  # ssh and kubectl start in another one
    command = [sys.executable, "-m", plan["program"], str(directory / "job.json")]
    os.execve(sys.executable, command, environment)  # noqa: S606 - no shell


def _fault(plan: Mapping[str, Any], count: str, *, is_first: bool) -> str | None:
    expected = plan["settings"]["WORLD_SIZE"]
    if count not in ("", expected):
        return (
            f"found {count} ranks, expected {expected}. Fix: let launch.command start {{command}} "
            "once for each rank, or set launch.nodes and launch.processes to what it starts"
        )
    found, driver = installation() if is_first else {}, plan["installation"]
    for name in found.keys() & driver.keys():
        if found[name] != driver[name]:
            return (
                f"{name}: found {found[name]}, expected {driver[name]} as on the driver's "
                "machine. Fix: install the same environment on all machines"
            )
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
