"""The frame of every launched program: read the job, do the work, leave a manifest or the reason why there is none."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.stages import heartbeat
from rlhf_pipeline.stages.fingerprint import library_versions
from rlhf_pipeline.stages.job import PROGRAMS, LaunchedJob
from rlhf_pipeline.stages.manifest import Manifest, file_entries
from rlhf_pipeline.stages.trust import trusting

ERRORS = "errors"
"""Folder of the work directory where a failing rank leaves its reason, named by time and rank."""

REASON_BYTES = 2**14
"""Longest reason; the end of a longer one is kept."""

DRIVER = "RLHF_DRIVER"
"""Environment variable that names the process which launched this program."""

LAUNCH = "RLHF_LAUNCH"
"""Environment variable that all processes of a launch have in common, those that left its process group included: the
driver and the work directory."""


def run_program(main: Callable[[LaunchedJob], dict[str, float]]) -> None:
    """Run `main` on the job named on the command line; the first rank writes the manifest from the metrics it returns.

    A failing rank leaves its reason in the work directory before it exits with 1: a `PipelineError`'s message as it is,
    anything else with its traceback.
    """
    local = DRIVER in os.environ  # not by hand, and not on another machine
    if local:
        _end_with_driver()
    job = LaunchedJob.read(Path(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    faulthandler.enable()  # a crash in compiled code leaves its stack in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # what the driver asks of a rank that is stuck
    try:
        heartbeat.start(job.directory, rank, local=local)
        with trusting(job.trust_remote_code):
            metrics = main(job)
        if rank == 0:
            write_manifest(job, metrics)
        heartbeat.at("finished")
    except BaseException as error:
        reason = str(error) if isinstance(error, PipelineError) else traceback.format_exc()
        _leave_reason(job.directory / ERRORS, rank, reason)
        raise


def reserve_reasons(directory: Path, ranks: int) -> None:
    """Empty the folder of reasons, and keep room there for one of each rank: a full disk is the reason then."""
    folder = directory / ERRORS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for rank in range(ranks):
        with _reserve(folder, rank).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, REASON_BYTES)


def _reserve(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.reserve"


def _leave_reason(folder: Path, rank: int, reason: str) -> None:
    folder.mkdir(exist_ok=True)
    reserve = _reserve(folder, rank)
    with reserve.open("r+b" if reserve.is_file() else "wb") as file:
        file.write(reason.encode()[-REASON_BYTES:])
        file.truncate()
    reserve.rename(folder / f"{time.time_ns()}-rank{rank}.txt")


def _end_with_driver() -> None:
    """End all of this launch soon after the process that launched it is gone, by SIGKILL for example.

    Ranks would train on unseen otherwise, and write where the next attempt writes.
    """
    driver, born = os.environ[DRIVER].split("@")

    def watch() -> None:
        while driver_id(int(driver)) == f"{driver}@{born}":
            time.sleep(0.5)
        kill_strays(os.environ[LAUNCH], but_group=os.getpgrp())
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def kill_strays(launch: str, *, but_group: int | None = None) -> None:
    """Kill the processes of a launch wherever they are, such as a worker with a session of its own, except in a group."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH) == launch and os.getpgid(process.pid) != but_group:
                process.kill()
        except (psutil.Error, OSError):
            continue  # not ours to look at, or gone


def driver_id(pid: int) -> str | None:
    """What tells one process from all others on this machine, a later one of the same number included; None if it is gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{pid}@{process.create_time()}"
    except psutil.NoSuchProcess:
        return None


def write_manifest(job: LaunchedJob, metrics: dict[str, float]) -> None:
    """Declare the export finished."""
    Manifest(
        stage=job.stage,
        fingerprint=job.fingerprint,
        seed=job.seed,
        config=job.config,
        inputs=job.digests,
        versions=library_versions(PROGRAMS[job.stage]),
        metrics=metrics,
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
        deepspeed=json.loads(job.deepspeed_file.read_text()) if job.deepspeed_file.is_file() else {},
        files=file_entries(job.export),
        adjusted=job.adjusted,
    ).write(job.export)
