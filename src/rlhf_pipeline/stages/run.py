"""Running a stage: found finished, or launched; either way a finished artifact comes back."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ArtifactError, ForeignFileError, Interrupted, StageError
from rlhf_pipeline.stages import events, heartbeat
from rlhf_pipeline.stages.checkpoints import checkpoints_in, newest_whole
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.forcing import forced
from rlhf_pipeline.stages.hints import CPU_MEMORY, GPU_MEMORY
from rlhf_pipeline.stages.job import Job, as_json, write_job
from rlhf_pipeline.stages.launcher import launch, process_count
from rlhf_pipeline.stages.lock import await_programs, recipe_lock
from rlhf_pipeline.stages.manifest import Manifest, artifact_of, content_digest, verify
from rlhf_pipeline.stages.planning import active_plan, identify
from rlhf_pipeline.stages.room import full_disk_told
from rlhf_pipeline.stages.smaller_batches import adjusted, halved
from rlhf_pipeline.stages.workspace import RECIPE, attempts, next_attempt, write_whole

logger = logging.getLogger(__name__)


def run_stage(job: Job, launch_config: LaunchConfig, workspace: Path) -> Path:
    """Run a stage, or find it finished; return its artifact.

    The recipe's fingerprint names the work directory, so an unchanged recipe is found whatever ran in between, and a
    changed one starts in a directory of its own. Two runs of one recipe wait for each other. A finished result that was
    damaged since is made again. A forced one (`forcing`) is made in another directory; it counts when it is finished.

    Raises:
        ArtifactError: an input is incomplete or was altered.
        StageError: the program failed; the message holds the failing rank's own error. Or another process runs the recipe,
            and `launch.wait` is false.
        Interrupted: a signal ended it.
    """
    plan = active_plan()
    if plan is not None:
        return plan.add(job, launch_config, workspace)
    digests = {name: content_digest(path) for name, path in job.inputs.items()} | dict(job.identities)
    run = identify(job, digests, launch_config, workspace)
    with full_disk_told(f"stage {run.stage}", workspace), recipe_lock(run.directory, wait=launch_config.wait):
        finished = _finished(run)
        if finished is not None and not forced(run.stage, run.fingerprint):
            events.started(finished)
            events.ended(finished, "FINISHED", Manifest.read(finished.export).metrics)
            (finished.directory / RECIPE).touch()
            return finished.export
        _verify_inputs(job)
        directory = attempts(run.directory)[-1:] or [run.directory]
        if finished is not None and directory == [finished.directory]:
            directory = [next_attempt(run.directory)]
        run = replace(run, directory=directory[0])
        attempted = job
        while True:
            try:
                return _attempt(attempted, replace(run, adjusted=adjusted(job.config, attempted.config)), launch_config)
            except StageError as error:
                smaller = halved(attempted.config)
                out_of_memory = error.cause in (GPU_MEMORY, CPU_MEMORY)
                if not (launch_config.halve_micro_batch_on_oom and out_of_memory) or smaller is None:
                    raise
                attempted = replace(job, config=smaller)


def _attempt(job: Job, run: StageRun, launch_config: LaunchConfig) -> Path:
    """Launch the program, from its newest whole checkpoint on; return its artifact."""
    run.directory.mkdir(parents=True, exist_ok=True)
    await_programs(run.directory)
    resume_from = newest_whole(run.directory / "checkpoints")
    _clear(run, keep_progress=resume_from is not None)
    write_whole(run.directory / RECIPE, json.dumps(run.recipe, indent=2))
    job_file = write_job(
        job, run.directory, fingerprint=run.fingerprint, digests=run.inputs, resume_from=resume_from,
        collective_timeout_s=launch_config.collective_timeout_s, adjusted=run.adjusted,
    )  # fmt: skip
    run = replace(run, config=as_json(job.config), resumed_from=resume_from)
    events.started(run)
    try:
        launch(job.program, job_file, run, launch_config, process_count(launch_config))
        metrics = Manifest.read(run.export).metrics
        for checkpoint in checkpoints_in(run.directory / "checkpoints"):  # nothing is left to go on with
            shutil.rmtree(checkpoint)
        shutil.rmtree(run.directory / heartbeat.FOLDER, ignore_errors=True)
    except BaseException as error:
        killed = isinstance(error, Interrupted | KeyboardInterrupt)
        events.ended(run, "KILLED" if killed else "FAILED", {})
        raise
    events.ended(run, "FINISHED", metrics)
    return run.export


def _finished(run: StageRun) -> StageRun | None:
    """The newest attempt whose result is whole; None where there is none to reuse.

    Raises:
        ForeignFileError: it is whole, and more. To make it again would cost the whole stage, and lose what was added.
    """
    for directory in reversed(attempts(run.directory)):
        attempt = replace(run, directory=directory, cached=True)
        if not attempt.export.is_dir():
            continue
        try:
            verify(attempt.export)
        except ForeignFileError:
            raise
        except ArtifactError as error:
            logger.warning("A result of stage %s is passed over: %s", run.stage, error)
            continue
        return attempt
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
    for partial in (run.directory / "checkpoints").rglob("*.partial"):  # they hold room that is needed now
        shutil.rmtree(partial, ignore_errors=True)
    for path in (run.directory / "deepspeed.json", *([] if keep_progress else [run.metrics_file])):
        path.unlink(missing_ok=True)
