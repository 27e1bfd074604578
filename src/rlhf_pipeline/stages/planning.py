"""What stages would do, told without doing it: inside `planning()`, `run_stage` notes and launches nothing.

So a plan is made by the nodes' own code. A stage that is not finished answers with the place where its result will lie; what
depends on it is known to run, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.checkpoints import PREFIX, checkpoints_in
from rlhf_pipeline.stages.differences import differences
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.fingerprint import fingerprint, recipe
from rlhf_pipeline.stages.forcing import forced
from rlhf_pipeline.stages.job import Job, as_json
from rlhf_pipeline.stages.launcher import process_count
from rlhf_pipeline.stages.lock import user
from rlhf_pipeline.stages.manifest import NAME, content_digest
from rlhf_pipeline.stages.workspace import attempts, damage, first_attempt, is_finished, last_recipe, next_attempt


@dataclass(frozen=True)
class PlannedStage:
    """What one stage would do."""

    run: StageRun
    state: Literal["finished", "resume", "run", "may run"]
    """`may run`: it runs unless an input that is made anew comes out as it was, byte for byte."""
    reasons: tuple[str, ...] = ()
    """Why it is not finished."""


class Plan:
    """The stages of a pipeline in the order in which their nodes ask for them."""

    def __init__(self) -> None:
        self.stages: dict[str, PlannedStage] = {}
        self._unmade: dict[Path, str] = {}

    def add(self, job: Job, launch_config: LaunchConfig, workspace: Path) -> Path:
        """Note what a stage would do; return where its result lies, or will lie."""
        unmade = {name: stage for name, path in job.inputs.items() if (stage := self.maker(path)) is not None}
        digests = {name: content_digest(path) for name, path in job.inputs.items() if name not in unmade}
        run = identify(job, digests | unmade | dict(job.identities), launch_config, workspace)
        if run.fingerprint not in self.stages:
            self.stages[run.fingerprint] = planned = _planned(run, unmade)
            if planned.state != "finished":
                self._unmade[planned.run.export] = run.title
        return self.stages[run.fingerprint].run.export

    def unmade(self, title: str) -> Path:
        """The place of a result that is known to be unmade, and no more."""
        path = Path("/unmade") / title
        self._unmade[path] = title
        return path

    def maker(self, path: Path) -> str | None:
        """The stage that is to make what lies at a path, None where it is made."""
        return next((stage for place, stage in self._unmade.items() if place in (path, *path.parents)), None)


_active: list[Plan] = []


@contextmanager
def planning() -> Iterator[Plan]:
    """Plan the stages that are run inside the block."""
    _active.append(Plan())
    try:
        yield _active[-1]
    finally:
        _active.pop()


def active_plan() -> Plan | None:
    """The plan that stages are to be noted in; None: they are to run."""
    return _active[-1] if _active else None


def identify(job: Job, digests: Mapping[str, str], launch_config: LaunchConfig, workspace: Path) -> StageRun:
    """The run of a job by its fingerprint, in the directory of its first attempt.

    With `launch.continue_from`, what that number of ranks finished or began is found under its own fingerprint.
    """
    run = _identified(job, digests, process_count(launch_config), workspace)
    if launch_config.continue_from is None or attempts(run.directory):
        return run
    earlier = _identified(job, digests, launch_config.continue_from, workspace)
    return earlier if attempts(earlier.directory) else run


def _identified(job: Job, digests: Mapping[str, str], processes: int, workspace: Path) -> StageRun:
    ingredients = recipe(job, digests=digests, processes=processes)
    key = fingerprint(ingredients)
    directory = first_attempt(workspace, job.stage, key)
    return StageRun(
        job.stage,
        key,
        directory,
        as_json(job.config),
        job.seed,
        dict(digests),
        cached=False,
        paths=job.inputs,
        recipe=ingredients,
    )


def downstream(stages: Iterable[str]) -> str:
    """Of which stages another one awaits the result."""
    return f"downstream of {', '.join(dict.fromkeys(stages))}"


def _planned(run: StageRun, unmade: Mapping[str, str]) -> PlannedStage:
    holder = user(run.directory)
    in_use = [f"in use by {holder}"] if holder else []
    existing = attempts(run.directory)
    finished = next((path for path in reversed(existing) if is_finished(path)), None)
    force = forced(run.stage, run.fingerprint)
    if finished is not None and not force:
        return PlannedStage(replace(run, directory=finished, cached=True), "finished")
    if not existing:
        return _new(run, unmade)
    if existing[-1] == finished:
        return PlannedStage(replace(run, directory=next_attempt(run.directory)), "run", ("forced", *in_use))
    run = replace(run, directory=existing[-1])
    checkpoints = checkpoints_in(run.directory / "checkpoints")
    if checkpoints:
        step = int(checkpoints[-1].name.removeprefix(PREFIX))
        return PlannedStage(replace(run, resumed_from=step), "resume", tuple(in_use))
    broken = damage(run.export) if (run.export / NAME).is_file() else None
    why = f"its result is damaged: {broken}" if broken else "an earlier attempt did not finish"
    return PlannedStage(run, "run", tuple(in_use or [why]))


def _new(run: StageRun, unmade: Mapping[str, str]) -> PlannedStage:
    """A recipe that has no work directory: told by what is new in it."""
    awaited = [downstream(unmade.values())] if unmade else []
    last = last_recipe(run.directory.parent, run.recipe)
    new = differences(last, run.recipe, unmade=unmade) if last is not None else ["never run here"]
    return PlannedStage(run, "run" if new else "may run", (*awaited, *new))
