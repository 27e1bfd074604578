"""What can be removed from the workspace because nothing published depends on it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.checkpoint_files import checkpoint_step, list_checkpoints
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest
from rlhf_pipeline.stages.cache.lock import recipe_lock, user
from rlhf_pipeline.stages.cache.workspace import attempts, damage, is_attempt, is_finished


@dataclass(frozen=True)
class Leftover:
    """A directory that can be removed."""

    path: Path
    why: str
    size: int
    """Bytes of its files."""
    freed: int
    """Bytes that become free when all leftovers are removed. A file of a published version has another hard link and frees
    nothing."""


def first_of(path: Path) -> Path:
    """The first attempt at the recipe of a work directory."""
    return path.with_suffix("")


def survey(
    workspace: Path, published: Collection[Path], abandoned: Collection[Path], *, unfinished: bool
) -> tuple[list[Leftover], dict[Path, str]]:
    """Look for leftovers.

    Args:
        workspace: folder of all work directories.
        published: all published versions. Whatever one of them was made from is kept, directly or through its inputs.
        abandoned: directories left by runs that died while publishing.
        unfinished: whether to remove unfinished stages that could resume from a checkpoint.

    Returns:
        The directories to remove, and those kept although nothing published was made from them, with the reason.

    Raises:
        ArtifactError: the manifest of a published version is damaged, so its origin is unknown.
    """
    directories = [path for path in sorted(workspace.glob("[!.]*/*")) if is_attempt(path)]
    in_use = {path: holder for path in directories if (holder := user(first_of(path))) is not None}
    resumable = {path: step for path in directories if (step := _resumes_from(path)) is not None}
    needed_by = [
        path for path in directories if path in in_use or (path in resumable and not unfinished)
    ]
    needed = _needed(directories, published, needed_by)
    doomed = {
        path: why
        for path in directories
        if path not in in_use and (why := _fate(path, needed)) is not None
    }
    kept = {
        path: f"in use by {holder}"
        for path, holder in in_use.items()
        if _fate(path, needed) is not None
    }
    for path, step in resumable.items():
        if path in doomed and not unfinished:
            del doomed[path]
            kept[path] = f"can resume from step {step}; --unfinished removes it"
    doomed |= dict.fromkeys(abandoned, "left by an interrupted publication")
    for path in [path for path in doomed if _behind_link(path)]:
        del doomed[path]
        kept[path] = f"is a link to {path.resolve()}; remove that yourself"
    return list(_weighed(doomed)), kept


def remove(leftover: Leftover, workspace: Path) -> str | None:
    """Remove a leftover. If a process uses it by now, leave it and return the name of that process."""
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
    """Whether a directory or its parent is a symbolic link."""
    return path.is_symlink() or path.parent.is_symlink()


def _needed(
    directories: list[Path], published: Collection[Path], needed_by: list[Path]
) -> set[Path]:
    """Finished work directories from which something published, or something resumable, was made."""
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
    """Why a work directory that is not in use can be removed; None if something published was made from it."""
    export = path / "export"
    if not (export / NAME).is_file():
        return "unfinished"
    if broken := damage(export):
        return f"damaged: {broken}"
    siblings = attempts(first_of(path))
    if any(is_finished(later) for later in siblings[siblings.index(path) + 1 :]):
        return "replaced by a later attempt"
    return None if path in needed else "nothing published was made from it"


def _resumes_from(path: Path) -> int | None:
    """The step from which an unfinished attempt can resume."""
    found = list_checkpoints(path / "checkpoints") if not is_finished(path) else []
    return checkpoint_step(found[-1]) if found else None


def _weighed(doomed: dict[Path, str]) -> Iterator[Leftover]:
    """Sizes and freed bytes: a file is freed when its last hard link goes, and counts at the first one."""
    files = {
        path: [file.lstat() for file in path.rglob("*") if not file.is_dir()] for path in doomed
    }
    names = Counter((stat.st_dev, stat.st_ino) for stats in files.values() for stat in stats)
    for path, why in doomed.items():
        size = freed = 0
        for stat in files[path]:
            size += stat.st_size
            if names.pop((stat.st_dev, stat.st_ino), 0) == stat.st_nlink:
                freed += stat.st_size
        yield Leftover(path, why, size, freed)
