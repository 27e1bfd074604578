"""The entry point of every launched program: read the job, do the work, write the manifest."""

import atexit
import faulthandler
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import Interrupted, PipelineError, without_secrets
from rlhf_pipeline.runtime import heartbeat, pulse
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import CURVES, Manifest, artifact_of, file_entries

ERRORS = "errors"
"""Folder of the work directory in which a failing rank writes its reason: `<time>-rank<n>.txt`."""

RENDEZVOUS = "RLHF_RENDEZVOUS"
"""Environment variable with the file through which the ranks of one machine meet."""

LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one machine meet; other machines cannot reach it."""

DETERMINISTIC = "RLHF_DETERMINISTIC"
"""Environment variable of ranks on GPUs that repeat their results, see `launch.deterministic`."""


def run_program(main: Callable[[LaunchedJob], dict[str, float]]) -> None:
    """Run `main` on the job named on the command line; rank 0 then writes the manifest. Then exit.

    A failing rank writes its reason into the work directory before it exits with code 1: the
    message of a `PipelineError`, or the traceback of any other exception.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `stages.processes.start`
    job = LaunchedJob.read(Path(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    faulthandler.enable()  # a crash in compiled code leaves its stack in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the driver to a stuck rank
    try:
        heartbeat.start(job.directory, rank)
        pulse.follow(job.directory)
        metrics = main(job)
        if rank == 0:
            write_manifest(job, metrics)
        heartbeat.begin_phase("finished")
    except BaseException as error:
        reason = str(error) if isinstance(error, PipelineError) else traceback.format_exc()
        with suppress(OSError):  # on a full disk, the driver explains the failure
            write_report(job.directory, rank, reason)
            heartbeat.begin_phase("interrupted" if isinstance(error, Interrupted) else "failed")
        raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes a second with torch in it


def write_report(directory: Path, rank: int, reason: str) -> None:
    """Write why a rank fails into a work directory, where the driver finds it."""
    report = directory / ERRORS / f"{time.time_ns()}-rank{rank}.txt"
    report.parent.mkdir(exist_ok=True)
    write_atomically(report, without_secrets(reason[-(2**14) :]))  # the end says most


def write_manifest(job: LaunchedJob, metrics: dict[str, float]) -> None:
    """Write the export's manifest, which marks the export as finished.

    A trained model takes the metrics of its training along.
    """
    has_engines = job.deepspeed_file.is_file()
    deepspeed = json.loads(job.deepspeed_file.read_text()) if has_engines else {}
    if has_engines and job.metrics_file.is_file():
        shutil.copyfile(job.metrics_file, job.export / CURVES)
    Manifest(
        stage=job.stage,
        fingerprint=job.fingerprint,
        seed=job.seed,
        config=job.config,
        inputs=job.digests,
        versions=job.versions,
        metrics=metrics,
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
        deepspeed=deepspeed,
        files=file_entries(job.export),
        mixture=job.mixture,
        ancestors=_ancestors(job),
    ).write(job.export)


def _ancestors(job: LaunchedJob) -> dict[str, dict[str, Any]]:
    """`Manifest.ancestors` of the export: its inputs that are artifacts, and their ancestors."""
    found: dict[str, dict[str, Any]] = {}
    for name, path in job.inputs.items():
        if (artifact := artifact_of(path)) is not None:
            made = Manifest.read(artifact)
            found |= made.ancestors | {job.digests[name]: made.origin}
    return found
