"""The work directories of stages, and which of them contains the result of a recipe.

    <workspace>/<stage>/<fingerprint>      the first attempt; resumed until it is finished
                        <fingerprint>.2    a later attempt: a finished stage was forced to run again
                        <attempt>/<name>.damaged-<time>     what was found damaged, for `clean`
    <workspace>/.locks/<stage>-<fingerprint>.lock, .json    lock of the recipe and its owner
    <workspace>/champions/<digest>         a version of the model registry, from an MLflow server

The newest finished attempt is the result, so a forced attempt that fails loses nothing. Directory
names contain the first 16 digits of the fingerprint.
"""

import json
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import NAME, Manifest

RECIPE = "recipe.json"
"""File with the recipe. Its modification time is the time of the last use."""

DOWNLOADS = "champions"
"""Folder of the workspace with downloaded versions of the model registry."""

DAMAGED = ".damaged-"
_ATTEMPT = re.compile(r"[0-9a-z]{16}(\.[0-9]+)?")


def first_attempt(workspace: Path, stage: str, fingerprint: str) -> Path:
    """The directory of a recipe's first attempt."""
    return workspace / stage / fingerprint[:16]


def attempts(first: Path) -> list[Path]:
    """All work directories of a recipe, oldest first."""
    later = [path for path in first.parent.glob(f"{first.name}.*") if is_attempt(path)]
    return [path for path in (first, *sorted(later, key=_number)) if path.is_dir()]


def work_directory(artifact: Path, workspace: Path) -> Path | None:
    """The work directory in which an artifact was made; None if it was removed."""
    manifest = Manifest.read(artifact)
    found = attempts(first_attempt(workspace, manifest.stage, manifest.fingerprint))
    return next((path for path in reversed(found) if (path / "job.json").is_file()), None)


def downloads(workspace: Path) -> list[Path]:
    """The downloaded versions; those whose download is not finished are not among them."""
    return sorted(path.parent for path in (workspace / DOWNLOADS).glob(f"*/{NAME}"))


def next_directory(first: Path, finished: Path | None) -> Path:
    """Where the next launch works: in the newest attempt, or in a new one if that is finished."""
    existing = attempts(first)
    if not existing or existing[-1] != finished:
        return existing[-1] if existing else first
    return first.with_name(f"{first.name}.{_number(finished) + 1}")


def is_attempt(path: Path) -> bool:
    """Whether a path has the name of a work directory."""
    return _ATTEMPT.fullmatch(path.name) is not None


def _number(path: Path) -> int:
    return int(path.suffix.removeprefix(".") or 1)


def damage(export: Path) -> str | None:
    """The first wrong name or size in a finished result, or None. `verify` also checks bytes."""
    try:
        manifest = Manifest.read(export)
    except ArtifactError as error:
        return str(error)
    for name, entry in manifest.files.items():
        path = export / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.size:
            return f"{name} has {path.stat().st_size} bytes, expected {entry.size}"
    return None


def is_finished(directory: Path) -> bool:
    """Whether a work directory contains a result without `damage`."""
    return (directory / "export" / NAME).is_file() and damage(directory / "export") is None


def set_aside(path: Path) -> Path:
    """Rename a damaged folder of a work directory, for `clean`; return its new path."""
    return path.rename(f"{path}{DAMAGED}{datetime.now():%Y-%m-%dT%H.%M.%S.%f}")


def has_run(workspace: Path, stage: str) -> bool:
    """Whether the stage was ever launched in this workspace."""
    return any((workspace / stage).glob(f"*/{RECIPE}"))


def earlier_recipes(stage_directory: Path, like: dict[str, object]) -> list[dict[str, object]]:
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
