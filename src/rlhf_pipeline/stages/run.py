"""Run a stage: reuse its finished artifact, or launch its program to make one.

1. `identify` computes the fingerprint of the recipe, which names the work directory.
2. A finished artifact there, or in the store, is reused. Otherwise `launch` runs the program, which
   resumes from the newest valid checkpoint and writes the manifest last.
3. The caller gets the artifact's folder, and its data set publishes it.
"""

import logging
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.errors import ArtifactError, ForeignFileError, Interrupted
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.files import force_to_disk
from rlhf_pipeline.runtime.job import LAST_SEAL, SEAL, list_checkpoints, newest_valid_step
from rlhf_pipeline.runtime.manifest import NAME, Manifest, artifact_of, content_digest, verify
from rlhf_pipeline.runtime.usage import Usage
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.cache.workspace import (
    RECIPE,
    attempts,
    next_directory,
    recipe_lock,
    set_aside,
)
from rlhf_pipeline.stages.job import Job, RunContext, StageRun, write_job
from rlhf_pipeline.stages.launch.failure import explain_full_disk
from rlhf_pipeline.stages.launch.launcher import launch
from rlhf_pipeline.stages.processes import kill_launch

logger = logging.getLogger(__name__)


class StageRunner:
    """Runs the stages of one `kedro run`."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._launched: set[str] = set()
        """Fingerprints of launched stages: two nodes may need the same forced stage."""

    def run(self, job: Job) -> Path:
        """Return the stage's finished artifact, made here or stored; else launch its program.

        Two runs of the same recipe wait for each other. A damaged artifact is made again. A forced
        stage runs in a new directory; its artifact replaces the earlier one when it is finished.

        Raises:
            ArtifactError: an input is incomplete or was changed.
            StageError: the program failed; the message contains the error of the failing rank. Or
                another process runs this recipe and `launch.wait` is false.
            Interrupted: a signal ended the stage.
        """
        context = self._context
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        run = identify(job, digests | dict(job.identities), context)
        with (
            explain_full_disk(f"stage {run.stage}", context.workspace),
            recipe_lock(run.directory, wait=context.launch.wait),
        ):
            finished = _finished(run)
            forced = run.stage in context.forced and run.fingerprint not in self._launched
            if finished is None and not forced:
                new = replace(run, directory=next_directory(run.directory, None))
                finished = new.directory if context.stored.fetch(new) else None
            if finished is not None and not forced:
                run = replace(run, directory=finished, cached=True)
                context.listener.stage_started(run)
                metrics = Manifest.read(run.export).metrics
                context.listener.stage_ended(run, "FINISHED", metrics)
                (run.directory / RECIPE).touch()
                _forget_training(job, run.checkpoints)
                return run.export
            for artifact in filter(None, map(artifact_of, job.inputs.values())):
                verify(artifact)  # every byte that the program will read
            run = replace(run, directory=next_directory(run.directory, finished))
            export = _attempt(job, run, context)
            self._launched.add(run.fingerprint)
            return export


def _attempt(job: Job, run: StageRun, context: RunContext) -> Path:
    """Launch the program, resuming from its newest valid checkpoint; return its artifact."""
    run.directory.mkdir(parents=True, exist_ok=True)
    kill_launch(f" {run.directory.resolve()}")  # what a killed driver may have left
    _remove_incomplete(run)
    resume_from = newest_valid_step(run.checkpoints)
    if resume_from is None and list_checkpoints(run.checkpoints):
        if run.metrics_file.is_file():
            run.metrics_file.rename(run.checkpoints / run.metrics_file.name)
        damaged = set_aside(run.checkpoints)
        logger.warning("stage %s: found no valid checkpoint; all are in %s", run.stage, damaged)
    resume_from = context.stored.fetch_checkpoint(run, resume_from)
    if resume_from is None:  # training makes all of it again
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        run.metrics_file.unlink(missing_ok=True)
    run.deepspeed_file.unlink(missing_ok=True)
    run = replace(run, resume_from=resume_from)
    write_job(run)
    context.listener.stage_started(run)
    begin = time.monotonic()
    try:
        launch(job.spec, run, context)
        metrics = Manifest.read(run.export).metrics
        force_to_disk(run.export)
        peaks = [each.peak for each in heartbeat.read_heartbeats(run.directory).values()]
        usage = Usage(time.monotonic() - begin, max(peaks, default=0), resume_from is not None)
        usage.write(run.directory)
        _forget_training(job, run.checkpoints)
        shutil.rmtree(run.directory / heartbeat.FOLDER, ignore_errors=True)
    except BaseException as error:
        _remove_incomplete(run)
        killed = isinstance(error, Interrupted | KeyboardInterrupt)
        context.listener.stage_ended(run, "KILLED" if killed else "FAILED", {})
        raise
    context.listener.stage_ended(run, "FINISHED", metrics)
    return run.export


def _finished(run: StageRun) -> Path | None:
    """The directory with the newest undamaged artifact of the recipe, or None.

    Damaged ones are set aside; published versions keep their files, which are hard links. Raises
    ForeignFileError if a file was added: to run the stage again would lose that file.
    """
    for directory in reversed(attempts(run.directory)):
        if (directory / "export").is_dir():
            try:
                verify(directory / "export")
                return directory
            except ForeignFileError:
                raise
            except ArtifactError as error:
                logger.warning("stage %s: an artifact is not reused: %s", run.stage, error)
                if (directory / "export" / NAME).is_file():  # else nobody finished it
                    set_aside(directory / "export")
    return None


def _forget_training(job: Job, checkpoints: Path) -> None:
    """Remove what a finished stage needed to resume, and the best model, of which the export is a
    copy. The best models stay if `keep_best` asks for several. The seal of the last checkpoint
    stays: `kedro rlhf prove` compares it."""
    for last in list_checkpoints(checkpoints)[-1:]:
        with suppress(OSError):  # the stage is finished without it
            shutil.copy(last / SEAL, checkpoints.with_name(LAST_SEAL))
    if any(getattr(block, "keep_best", 1) > 1 for block in job.config.values()):
        for checkpoint in list_checkpoints(checkpoints):
            shutil.rmtree(checkpoint)
    else:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _remove_incomplete(run: StageRun) -> None:
    """Remove an unfinished export and unfinished checkpoints: they may fill the disk."""
    if not (run.export / NAME).is_file():
        shutil.rmtree(run.export, ignore_errors=True)
    for partial in run.checkpoints.rglob("*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
