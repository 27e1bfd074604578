"""Running a stage: found finished, or launched; either way a finished artifact comes back."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ArtifactError, Interrupted, StageError
from rlhf_pipeline.stages import events
from rlhf_pipeline.stages.checkpoints import checkpoints_in, newest_whole
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.fingerprint import fingerprint
from rlhf_pipeline.stages.hints import CPU_MEMORY, GPU_MEMORY
from rlhf_pipeline.stages.job import Job, as_json, write_job
from rlhf_pipeline.stages.launcher import launch, process_count
from rlhf_pipeline.stages.manifest import NAME, Manifest, artifact_of, content_digest, verify
from rlhf_pipeline.stages.smaller_batches import adjusted, halved

logger = logging.getLogger(__name__)


def run_stage(job: Job, launch_config: LaunchConfig, workspace: Path) -> Path:
    """Run a stage, or find it finished; return its artifact.

    The recipe's fingerprint names the work directory, so an unchanged recipe is found whatever ran in between, and a
    changed one starts in a directory of its own. Two runs of one recipe wait for each other. A finished result that was
    damaged since is made again.

    Raises:
        ArtifactError: an input is incomplete or was altered.
        StageError: the program failed; the message holds the failing rank's own error.
        Interrupted: a signal ended it.
    """
    digests = {name: content_digest(path) for name, path in job.inputs.items()} | dict(job.identities)
    processes = process_count(launch_config)
    key = fingerprint(job, digests=digests, processes=processes)
    directory = workspace / job.stage / key[:16]
    directory.mkdir(parents=True, exist_ok=True)
    run = StageRun(job.stage, key, directory, as_json(job.config), job.seed, digests, cached=False, paths=job.inputs)
    with FileLock(directory / ".lock"):
        finished = _finished(run)
        if finished is not None:
            run = replace(run, cached=True)
            events.started(run)
            events.ended(run, "FINISHED", finished.metrics)
            return run.export
        _verify_inputs(job)
        attempted = job
        while True:
            try:
                return _attempt(
                    attempted, replace(run, adjusted=adjusted(job.config, attempted.config)), launch_config, processes
                )
            except StageError as error:
                smaller = halved(attempted.config)
                out_of_memory = error.cause in (GPU_MEMORY, CPU_MEMORY)
                if not (launch_config.halve_micro_batch_on_oom and out_of_memory) or smaller is None:
                    raise
                attempted = replace(job, config=smaller)


def _attempt(job: Job, run: StageRun, launch_config: LaunchConfig, processes: int) -> Path:
    """Launch the program, from its newest whole checkpoint on; return its artifact."""
    resume_from = newest_whole(run.directory / "checkpoints")
    _clear(run, keep_progress=resume_from is not None)
    job_file = write_job(
        job, run.directory, fingerprint=run.fingerprint, digests=run.inputs, resume_from=resume_from,
        collective_timeout_s=launch_config.collective_timeout_s, adjusted=run.adjusted,
    )  # fmt: skip
    run = replace(run, config=as_json(job.config), resumed_from=resume_from)
    events.started(run)
    try:
        launch(job.program, job_file, run, launch_config, processes)
        metrics = Manifest.read(run.export).metrics
        for checkpoint in checkpoints_in(run.directory / "checkpoints"):  # nothing is left to go on with
            shutil.rmtree(checkpoint)
    except BaseException as error:
        killed = isinstance(error, Interrupted | KeyboardInterrupt)
        events.ended(run, "KILLED" if killed else "FAILED", {})
        raise
    events.ended(run, "FINISHED", metrics)
    return run.export


def _finished(run: StageRun) -> Manifest | None:
    """The manifest of the stage's own result; None where there is none to reuse."""
    if not (run.export / NAME).is_file():
        return None
    try:
        return verify(run.export)
    except ArtifactError as error:
        logger.warning(
            "The result of stage %s in the cache is damaged, so the stage is run again: %s", run.stage, error
        )
        return None


def _verify_inputs(job: Job) -> None:
    """Check every byte of the artifacts that a program is about to read."""
    for path in job.inputs.values():
        artifact = artifact_of(path)
        if artifact is not None:
            verify(artifact)


def _clear(run: StageRun, *, keep_progress: bool) -> None:
    """Remove what an earlier attempt left, but for the checkpoints that this one goes on from, and the metrics until there.

    A published version shares files with the export by hard links, and keeps its own.
    """
    for name in ("export", *([] if keep_progress else ["checkpoints"])):
        shutil.rmtree(run.directory / name, ignore_errors=True)
    for path in (run.directory / "deepspeed.json", *([] if keep_progress else [run.metrics_file])):
        path.unlink(missing_ok=True)
