"""What the stages of a pipeline would do, without launching anything.

The nodes run with a `Planner` in place of a `StageRunner`. For a stage that is not finished, the
planner returns the future path of its result, so stages that depend on it are known to be pending.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf_pipeline.runtime.checkpoint_files import newest_step
from rlhf_pipeline.runtime.manifest import NAME, content_digest
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.cache.lock import user
from rlhf_pipeline.stages.cache.recipe_diff import distance, recipe_changes
from rlhf_pipeline.stages.cache.workspace import (
    attempts,
    damage,
    earlier_recipes,
    is_finished,
    next_directory,
)
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.stored import StoredStages


@dataclass(frozen=True)
class PlannedStage:
    """The plan of one stage."""

    run: StageRun
    state: Literal["finished", "reuse", "resume", "run", "may run"]
    """`reuse`: the artifact is downloaded from the store; here is its outline. `may run`: the stage
    runs unless its pending inputs come out unchanged."""
    reasons: tuple[str, ...] = ()
    """Why it is not finished here."""


class Planner:
    """Plans the stages of a pipeline, in the order in which their nodes ask for them."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._pending: dict[Path, str] = {}
        """Results that do not exist yet: path to the title of their stage."""
        self.stages: dict[str, PlannedStage] = {}
        """By fingerprint."""

    def run(self, job: Job) -> Path:
        pending = {
            name: stage
            for name, path in job.inputs.items()
            if (stage := self.pending_stage(path)) is not None
        }
        digests = {
            name: content_digest(path) for name, path in job.inputs.items() if name not in pending
        }
        run = identify(job, digests | pending | dict(job.identities), self._context)
        if run.fingerprint not in self.stages:
            self.stages[run.fingerprint] = planned = _plan(
                run, pending, self._context.stored, forced=run.stage in self._context.forced
            )
            if planned.state not in ("finished", "reuse"):
                self._pending[planned.run.export] = run.title
        return self.stages[run.fingerprint].run.export

    def add_pending(self, title: str) -> Path:
        """A placeholder for the result of a stage that cannot be planned."""
        path = Path("/pending") / title
        self._pending[path] = title
        return path

    def pending_stage(self, path: Path) -> str | None:
        """The title of the stage whose pending result contains a path; None if the path exists."""
        places = (path, *path.parents)
        return next((stage for place, stage in self._pending.items() if place in places), None)


def downstream(stages: Iterable[str]) -> str:
    """The pending stages that another stage depends on, in words."""
    return f"downstream of {', '.join(dict.fromkeys(stages))}"


def _plan(
    run: StageRun, pending: Mapping[str, str], stored: StoredStages | None, *, forced: bool
) -> PlannedStage:
    holder = user(run.directory)
    in_use = [f"in use by {holder}"] if holder else []
    existing = attempts(run.directory)
    finished = next((path for path in reversed(existing) if is_finished(path)), None)
    if finished is not None and not forced:
        return PlannedStage(replace(run, directory=finished, cached=True), "finished")
    if stored is not None and not pending and not forced:
        if outline := stored.outline(run):
            return PlannedStage(replace(run, directory=outline, cached=True), "reuse")
        here = existing and newest_step(existing[-1] / "checkpoints")
        if (step := stored.newest_step(run)) and step > (here or 0):
            return PlannedStage(replace(run, resume_from=step), "resume", ("from the store",))
    if not existing:
        return _plan_new(run, pending)
    run = replace(run, directory=next_directory(run.directory, finished))
    if run.directory not in existing:
        return PlannedStage(run, "run", ("forced", *in_use))
    step = newest_step(run.directory / "checkpoints")
    if step is not None:
        return PlannedStage(replace(run, resume_from=step), "resume", tuple(in_use))
    broken = damage(run.export) if (run.export / NAME).is_file() else None
    why = f"its result is damaged: {broken}" if broken else "an earlier attempt did not finish"
    return PlannedStage(run, "run", tuple(in_use or [why]))


def _plan_new(run: StageRun, pending: Mapping[str, str]) -> PlannedStage:
    """The plan of a recipe without a work directory; the reasons are its changes."""
    awaited = [downstream(pending.values())] if pending else []
    earlier = earlier_recipes(run.directory.parent, run.recipe)
    changes = [recipe_changes(recipe, run.recipe, pending=pending) for recipe in earlier]
    # The nearest recipe, not the last one, explains why the stage has to run.
    new = min(changes, key=distance) if changes else ["never run here"]
    return PlannedStage(run, "run" if new else "may run", (*awaited, *new))
