"""Where stages work, and which of a recipe's work directories holds its result.

    <workspace>/<stage>/<fingerprint>      the first attempt; taken up again until it is finished
                        <fingerprint>.2    a later one: the stage was forced to run again although finished
    <workspace>/.locks/<stage>-<fingerprint>.lock, .json    held while one of them is worked in; by whom

The newest finished attempt counts, so a forced one that dies takes nothing away. Fingerprints are cut to 16 digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.stages.manifest import NAME, Manifest

RECIPE = "recipe.json"
"""What the fingerprint is the digest of; its time is that of the recipe's last use."""

_ATTEMPT = re.compile(r"[0-9a-z]{16}(\.[0-9]+)?")


def first_attempt(workspace: Path, stage: str, fingerprint: str) -> Path:
    """The directory in which a recipe is run for the first time."""
    return workspace / stage / fingerprint[:16]


def attempts(first: Path) -> list[Path]:
    """All work directories of a recipe, oldest first."""
    later = [path for path in first.parent.glob(f"{first.name}.*") if is_attempt(path)]
    return [path for path in (first, *sorted(later, key=_number)) if path.is_dir()]


def next_attempt(first: Path) -> Path:
    """A directory that does not exist yet."""
    existing = attempts(first)
    return first.with_name(f"{first.name}.{_number(existing[-1]) + 1}") if existing else first


def is_attempt(path: Path) -> bool:
    """Whether a path is named as a work directory is."""
    return _ATTEMPT.fullmatch(path.name) is not None


def _number(path: Path) -> int:
    return int(path.suffix.removeprefix(".") or 1)


def damage(export: Path) -> str | None:
    """What a look at names and sizes finds wrong with a finished result, None where nothing; `verify` reads the bytes."""
    try:
        manifest = Manifest.read(export)
    except ArtifactError as error:
        return str(error)
    for name, entry in manifest.files.items():
        path = export / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.size:
            return f"{name} has {path.stat().st_size} bytes instead of {entry.size}"
    return None


def is_finished(directory: Path) -> bool:
    """Whether a work directory has a result that looks whole."""
    return (directory / "export" / NAME).is_file() and damage(directory / "export") is None


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: half of one, on a full disk, would end the commands that make room."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def has_run(workspace: Path, stage: str) -> bool:
    """Whether a stage was ever launched here."""
    return any((workspace / stage).glob(f"*/{RECIPE}"))


def last_recipe(stage_directory: Path, like: dict[str, object]) -> dict[str, object] | None:
    """The recipe of a stage that was used last; of the stages that read a source, of the same source."""
    found = sorted(stage_directory.glob(f"*/{RECIPE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((recipe for recipe in _readable(found) if _source(recipe) == _source(like)), None)


def _readable(recipes: list[Path]) -> Iterator[dict[str, object]]:
    """Those that are whole; a damaged one only tells nothing about what has changed since."""
    for path in recipes:
        with suppress(ValueError):
            yield json.loads(path.read_text())


def _source(recipe: dict[str, object]) -> object:
    config = recipe["config"]
    source = config.get("source") if isinstance(config, dict) else None
    return source and (source["name"], source.get("path"))
