"""What the stages of a pipeline would do and why, without launching anything."""

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
from rlhf_pipeline.stages.job import Job, RunContext, StageRun


@dataclass(frozen=True)
class PlannedStage:
    """The plan of one stage."""

    run: StageRun
    state: Literal["finished", "reuse", "resume", "run", "may run"]
    """`reuse`: the artifact is downloaded from the store; `run` has its manifest. `may run`: the
    stage runs unless its pending inputs come out unchanged."""
    reasons: tuple[str, ...] = ()  # why it is not finished here


class Planner:
    """Plans the stages of a pipeline; the nodes run with it in place of a `StageRunner`.

    For a stage that is not finished, `run` returns the future path of its result, so stages that
    depend on it are known to be pending.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._pending: dict[Path, str] = {}  # result that does not exist yet: title of its stage
        self.stages: dict[str, PlannedStage] = {}  # by fingerprint

    def run(self, job: Job) -> Path:
        titles = {name: self.pending_stage(path) for name, path in job.inputs.items()}
        pending = {name: title for name, title in titles.items() if title is not None}
        digests = {
            name: content_digest(path) for name, path in job.inputs.items() if name not in pending
        }
        run = identify(job, digests | pending | dict(job.identities), self._context)
        if run.fingerprint not in self.stages:
            self.stages[run.fingerprint] = planned = _plan(run, pending, self._context)
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


def _plan(run: StageRun, pending: Mapping[str, str], context: RunContext) -> PlannedStage:
    forced, stored = run.stage in context.forced, context.stored
    holder = user(run.directory)
    in_use = [f"in use by {holder}"] if holder else []
    existing = attempts(run.directory)
    finished = next((path for path in reversed(existing) if is_finished(path)), None)
    if finished is not None and not forced:
        return PlannedStage(replace(run, directory=finished, cached=True), "finished")
    if not pending and not forced:
        if copied := stored.manifest_copy(run):
            return PlannedStage(replace(run, directory=copied, cached=True), "reuse")
        here = existing and newest_step(existing[-1] / "checkpoints")
        if (step := stored.newest_step(run)) and step > (here or 0):
            return PlannedStage(replace(run, resume_from=step), "resume", ("from the store",))
    if not existing:
        awaited = [downstream(pending.values())] if pending else []
        earlier = _earlier_recipes(run.directory.parent, run.recipe)
        changes = [recipe_changes(recipe, run.recipe, pending=pending) for recipe in earlier]
        # The nearest recipe explains why the stage has to run.
        nearest = min(changes, key=len, default=["never run here"])
        return PlannedStage(run, "run" if nearest else "may run", (*awaited, *nearest))
    run = replace(run, directory=next_directory(run.directory, finished))
    if run.directory not in existing:
        return PlannedStage(run, "run", ("forced", *in_use))
    step = newest_step(run.directory / "checkpoints")
    if step is not None:
        return PlannedStage(replace(run, resume_from=step), "resume", tuple(in_use))
    broken = damage(run.export) if (run.export / NAME).is_file() else None
    why = f"its result is damaged: {broken}" if broken else "an earlier attempt did not finish"
    return PlannedStage(run, "run", tuple(in_use or [why]))


def recipe_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, pending: Collection[str]
) -> list[str]:
    """The changes between two recipes of a stage (`fingerprint.recipe`), most likely causes first.

    `pending` inputs do not exist yet, so their content cannot be compared.
    """
    code = sorted({name for name, _ in old["code"].items() ^ new["code"].items()})
    return [
        *value_changes(_settings(old), _settings(new)),
        *input_changes(old["inputs"], new["inputs"], pending),
        *value_changes(old["versions"], new["versions"]),
        *([f"code changed: {', '.join(code)}"] if code else []),
    ]


def input_changes(
    old: Mapping[str, str], new: Mapping[str, str], ignored: Collection[str]
) -> Iterator[str]:
    """`input NAME changed`, `is new` or `is gone`, for each input with another digest."""
    fates = {name: "changed" if name in new else "is gone" for name in old}
    for name in sorted({name for name, _ in old.items() ^ new.items()} - {*ignored}):
        yield f"input {name} {fates.get(name, 'is new')}"


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **recipe["config"],
        "seed": recipe["seed"],
        "processes": recipe["processes"],
        "base_model.trust_remote_code": recipe.get("trust_remote_code", False),
        "launch.deterministic": recipe.get("deterministic", False),
    }


def value_changes(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """`ppo.kl.coef 0.1 -> 0.2`, for each value that differs; entries of lists are numbered."""
    for name in dict.fromkeys([*new, *old]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, list) and isinstance(after, list):
            before, after = (dict(enumerate(each)) for each in (before, after))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from value_changes(before, after, f"{place}{name}.")
        elif before != after:
            yield f"{place}{name} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any, longest: int = 60) -> str:
    if isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if item is not None}
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _earlier_recipes(stage_directory: Path, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The recipes of a stage, last used first; for stage `source`, of the same source."""
    found = sorted(
        stage_directory.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )
    recipes = []
    for path in found:
        with suppress(ValueError):  # the file is damaged
            recipes.append(json.loads(path.read_text()))
    return [recipe for recipe in recipes if _comparable(recipe) == _comparable(like)]


def _comparable(recipe: Mapping[str, Any]) -> tuple[int | None, str | None, str | None]:
    """What two recipes have in common if they are compared: their form, and the source."""
    source = recipe.get("config", {}).get("source", {})
    return recipe.get("form"), source.get("name"), source.get("path")
