"""What the stages of a pipeline would do and why, without launching anything.

The nodes run with a `Planner` in place of a `StageRunner`. For a stage that is not finished, the
planner returns the future path of its result, so stages that depend on it are known to be pending.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_pipeline.runtime.job import newest_step
from rlhf_pipeline.runtime.manifest import NAME, content_digest
from rlhf_pipeline.stages.cache.fingerprint import identify
from rlhf_pipeline.stages.cache.workspace import (
    RECIPE,
    attempts,
    damage,
    is_finished,
    next_directory,
    user,
)
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.stored import StoredStages

EARLIER_FORM = (
    "its recipe was written by an earlier version of rlhf-pipeline and cannot be compared"
)


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
        return self.plan(job).run.export

    def plan(self, job: Job) -> PlannedStage:
        """The plan of one stage."""
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
        return self.stages[run.fingerprint]

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
    earlier = _earlier_recipes(run.directory.parent, run.recipe)
    changes = [recipe_changes(recipe, run.recipe, pending=pending) for recipe in earlier]
    # The nearest recipe, not the last one, explains why the stage has to run.
    new = min(changes, key=distance) if changes else ["never run here"]
    return PlannedStage(run, "run" if new else "may run", (*awaited, *new))


def recipe_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, pending: Collection[str]
) -> list[str]:
    """The changes between two recipes of a stage (`fingerprint.recipe`), most likely causes first.

    `pending` inputs do not exist yet, so their content cannot be compared.
    """
    if old.get("form") != new["form"]:
        return [EARLIER_FORM]
    inputs = [name for name in _differing(old["inputs"], new["inputs"]) if name not in pending]
    code = _differing(old["code"], new["code"])
    return [
        *_changes(_settings(old), _settings(new)),
        *(f"input {name} {_fate(name, old['inputs'], new['inputs'])}" for name in inputs),
        *_changes(old["versions"], new["versions"]),
        *([f"code changed: {', '.join(code)}"] if code else []),
    ]


def distance(changes: Collection[str]) -> tuple[bool, int]:
    """Sorts recipes by their number of changes; those that cannot be compared come last."""
    return EARLIER_FORM in changes, len(changes)


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    flags = {"base_model": "trust_remote_code", "launch": "deterministic"}
    found = {f"{block}.{name}": recipe.get(name, False) for block, name in flags.items()}
    others = {name: recipe[name] for name in ("seed", "processes")}
    return recipe["config"] | others | found


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """`ppo.kl.coef 0.1 -> 0.2`, for each value that differs; entries of lists are numbered."""
    for name in dict.fromkeys([*new, *old]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, list) and isinstance(after, list):
            before, after = (dict(enumerate(each)) for each in (before, after))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{place}{name}.")
        elif before != after:
            yield f"{place}{name} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any, longest: int = 60) -> str:
    if isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if item is not None}
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _fate(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    if name in old and name in new:
        return "changed"
    return "is new" if name in new else "is gone"


def _earlier_recipes(stage_directory: Path, like: dict[str, object]) -> list[dict[str, object]]:
    """The recipes of a stage, last used first; for stage `source`, of the same source."""
    found = sorted(
        stage_directory.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )
    recipes = []
    for path in found:
        with suppress(ValueError):  # the file is damaged
            recipes.append(json.loads(path.read_text()))
    return [recipe for recipe in recipes if _source(recipe) == _source(like)]


def _source(recipe: dict[str, object]) -> object:
    config = recipe.get("config")
    source = config.get("source") if isinstance(config, dict) else None
    return source and (source["name"], source.get("path"))
