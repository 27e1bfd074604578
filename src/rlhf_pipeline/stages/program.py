"""The frame of every launched program: read the job, do the work, leave a manifest or the reason why there is none."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.stages.fingerprint import library_versions
from rlhf_pipeline.stages.job import PROGRAMS, LaunchedJob
from rlhf_pipeline.stages.manifest import Manifest, file_entries

ERRORS = "errors"
"""Folder of the work directory where a failing rank leaves its reason, named by time and rank."""


def run_program(main: Callable[[LaunchedJob], dict[str, float]]) -> None:
    """Run `main` on the job named on the command line; the first rank writes the manifest from the metrics it returns.

    A failing rank leaves its reason in the work directory before it exits with 1: a `PipelineError`'s message as it is,
    anything else with its traceback.
    """
    job = LaunchedJob.read(Path(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    try:
        metrics = main(job)
        if rank == 0:
            write_manifest(job, metrics)
    except BaseException as error:
        reason = str(error) if isinstance(error, PipelineError) else traceback.format_exc()
        folder = job.directory / ERRORS
        folder.mkdir(exist_ok=True)
        (folder / f"{time.time_ns()}-rank{rank}.txt").write_text(reason)
        raise


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
        deepspeed=json.loads(job.deepspeed_file.read_text()) if job.deepspeed_file.is_file() else {},
        files=file_entries(job.export),
    ).write(job.export)
