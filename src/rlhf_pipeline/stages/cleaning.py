"""What lies in the workspace and serves no one any more."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.checkpoints import PREFIX, checkpoints_in
from rlhf_pipeline.stages.job import PROGRAMS
from rlhf_pipeline.stages.lock import recipe_lock, user
from rlhf_pipeline.stages.manifest import NAME, Manifest, content_digest
from rlhf_pipeline.stages.workspace import attempts, damage, is_attempt, is_finished


@dataclass(frozen=True)
class Leftover:
    """A directory that may go."""

    path: Path
    why: str
    size: int
    """Bytes of its files."""
    freed: int
    """Bytes that are free when all leftovers are gone. Files of a published version stay: they have another name there."""


@dataclass(frozen=True)
class _Work:
    """A work directory."""

    path: Path
    fate: str | None
    """Why it may go; None: it stays."""
    kept: str | None = None
    """Why it stays although nothing published comes from it."""


def first_of(path: Path) -> Path:
    """The first attempt at the recipe that a work directory belongs to."""
    return path.with_suffix("")


def survey(
    workspace: Path, published: Collection[Path], abandoned: Collection[Path], *, unfinished: bool
) -> tuple[list[Leftover], dict[Path, str]]:
    """Look for leftovers.

    Args:
        published: all published versions. What one of them comes from stays, directly or through its inputs.
        abandoned: directories that runs left which died while they published.
        unfinished: whether an unfinished stage may go although it has a checkpoint to go on from.

    Returns:
        What may go, and what stays though nothing published comes from it, with the reason.

    Raises:
        ArtifactError: a published version's manifest is damaged, so that nobody knows where it comes from.
    """
    directories = [path for stage in PROGRAMS for path in sorted((workspace / stage).glob("*")) if is_attempt(path)]
    in_use = {path: holder for path in directories if (holder := user(first_of(path))) is not None}
    going_on = {path: step for path in directories if (step := _goes_on_from(path)) is not None}
    needed_by = [path for path in directories if path in in_use or (path in going_on and not unfinished)]
    needed = _needed(directories, published, needed_by)
    doomed = {path: why for path in directories if path not in in_use and (why := _fate(path, needed)) is not None}
    kept = {path: f"in use by {holder}" for path, holder in in_use.items() if _fate(path, needed) is not None}
    for path, step in going_on.items():
        if path in doomed and not unfinished:
            del doomed[path]
            kept[path] = f"goes on from step {step} when it is run again; --unfinished removes it"
    doomed |= dict.fromkeys(abandoned, "half published")
    for path in [path for path in doomed if _behind_link(path)]:
        del doomed[path]
        kept[path] = f"a link leads to {path.resolve()}; remove that yourself"
    return list(_weighed(doomed)), kept


def remove(leftover: Leftover, workspace: Path) -> str | None:
    """Remove a leftover; where somebody has taken it meanwhile, return by whom and leave it."""
    if not leftover.path.is_relative_to(workspace):
        shutil.rmtree(leftover.path)
        if not any(leftover.path.parent.iterdir()):
            leftover.path.parent.rmdir()
        return None
    first = first_of(leftover.path)
    if holder := user(first):
        return holder
    try:
        with recipe_lock(first, wait=False, record=False):
            shutil.rmtree(leftover.path)
    except StageError as error:
        return str(error)
    return None


def _behind_link(path: Path) -> bool:
    """Whether a directory is a link, or lies in a stage's or a version's folder that is one."""
    return path.is_symlink() or path.parent.is_symlink()


def _needed(directories: list[Path], published: Collection[Path], needed_by: list[Path]) -> set[Path]:
    """Finished work directories that something published, or to be gone on with, comes from."""
    manifests = [Manifest.read(path) for path in published]
    fingerprints = {manifest.fingerprint for manifest in manifests}
    digests = {digest for manifest in manifests for digest in manifest.inputs.values()}
    for job in (path / "job.json" for path in needed_by):
        digests |= set(json.loads(job.read_text())["digests"].values()) if job.is_file() else set()
    pending = {path: Manifest.read(path / "export") for path in directories if is_finished(path)}
    needed: set[Path] = set()
    while True:
        found = [
            path for path, manifest in pending.items()
            if manifest.fingerprint in fingerprints or content_digest(path / "export") in digests
        ]  # fmt: skip
        if not found:
            return needed
        needed.update(found)
        digests |= {digest for path in found for digest in pending.pop(path).inputs.values()}


def _fate(path: Path, needed: set[Path]) -> str | None:
    """Why a work directory that nobody uses may go; None where something published comes from it."""
    export = path / "export"
    if not (export / NAME).is_file():
        return "unfinished"
    if broken := damage(export):
        return f"damaged: {broken}"
    siblings = attempts(first_of(path))
    if any(is_finished(later) for later in siblings[siblings.index(path) + 1 :]):
        return "made again since"
    return None if path in needed else "nothing published comes from it"


def _goes_on_from(path: Path) -> int | None:
    """The step whose checkpoint an unfinished attempt goes on from."""
    found = checkpoints_in(path / "checkpoints") if not is_finished(path) else []
    return int(found[-1].name.removeprefix(PREFIX)) if found else None


def _weighed(doomed: dict[Path, str]) -> Iterator[Leftover]:
    """Sizes, and what is freed: a file goes when all its names go, and counts at the first of them."""
    files = {path: [file.lstat() for file in path.rglob("*") if not file.is_dir()] for path in doomed}
    names = Counter((stat.st_dev, stat.st_ino) for stats in files.values() for stat in stats)
    for path, why in doomed.items():
        size = freed = 0
        for stat in files[path]:
            size += stat.st_size
            if names.pop((stat.st_dev, stat.st_ino), 0) == stat.st_nlink:
                freed += stat.st_size
        yield Leftover(path, why, size, freed)
