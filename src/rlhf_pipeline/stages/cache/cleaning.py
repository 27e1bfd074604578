"""Directories of the workspace that no published version needs."""

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.job import newest_step
from rlhf_pipeline.runtime.manifest import NAME, Manifest, content_digest
from rlhf_pipeline.stages.cache.workspace import (
    DAMAGED,
    attempts,
    damage,
    is_attempt,
    is_finished,
    recipe_lock,
    user,
)


@dataclass(frozen=True)
class Leftover:
    """A directory that can be removed."""

    path: Path
    why: str
    freed: int
    """Bytes that become free when all leftovers are removed: none for files with other links."""


def survey(
    workspace: Path,
    stages: Collection[str],
    published: Collection[Path],
    unwanted: Mapping[Path, str],
    *,
    unfinished: bool,
) -> tuple[list[Leftover], dict[Path, str]]:
    """The directories to remove, and those kept although no published version needs them, and why.

    Args:
        stages: names of all stages; other folders of the workspace are ignored.
        published: the published versions to keep, with their inputs, direct or not.
        unwanted: further directories to remove, with the reason.
        unfinished: whether to remove unfinished stages that could resume from a checkpoint.

    Raises ArtifactError if the manifest of a published version is damaged: its inputs are unknown.
    """
    named = (path for stage in stages for path in (workspace / stage).glob("*"))
    directories, held = sorted(filter(is_attempt, named)), dict[Path, str]()
    for path in directories:
        step = None if unfinished or is_finished(path) else newest_step(path / "checkpoints")
        if holder := user(_first_of(path)):
            held[path] = f"in use by {holder}"
        elif step is not None:
            held[path] = f"can resume from step {step}; --unfinished removes it"
    jobs = [json.loads(job.read_text()) for path in held if (job := path / "job.json").is_file()]
    read = {place for job in jobs for place in job.get("inputs", {}).values()}
    held |= {path: "an input of a kept stage" for path in unwanted if str(path.resolve()) in read}
    manifests = [Manifest.read(path) for path in published]
    inputs = [manifest.inputs for manifest in manifests] + [job["digests"] for job in jobs]
    digests = {digest for each in inputs for digest in each.values()}
    needed = _needed(directories, {manifest.fingerprint for manifest in manifests}, digests)
    found = {path: why for path in directories if (why := _reason(path, needed)) is not None}
    gone = found.keys() - held.keys()
    found |= {path: why for path, why in unwanted.items() if path.parent not in gone}
    for path in [path for path in found if path.is_symlink() or path.parent.is_symlink()]:
        held.setdefault(path, f"is a link to {path.resolve()}; remove that yourself")
    removable = {path: why for path, why in found.items() if path not in held}
    return list(_with_sizes(removable)), {path: held[path] for path in found if path in held}


def remove(leftover: Leftover, workspace: Path) -> str | None:
    """Remove a leftover; if a process uses it by now, keep it and return that process in words."""
    if workspace not in leftover.path.parents[1:]:  # no attempt at a recipe
        shutil.rmtree(leftover.path)
        if not any(leftover.path.parent.iterdir()):
            leftover.path.parent.rmdir()
        return None
    first = _first_of(leftover.path)
    if holder := user(first):
        return holder
    try:
        with recipe_lock(first, wait=False, record=False):
            shutil.rmtree(leftover.path)
    except StageError:
        return user(first) or "another process"
    return None


def _first_of(path: Path) -> Path:
    """The directory of the first attempt at the same recipe."""
    return (path.parent if DAMAGED in path.name else path).with_suffix("")


def _needed(directories: list[Path], fingerprints: Set[str], digests: Set[str]) -> set[Path]:
    """Finished directories with these recipes or this content, and their inputs, direct or not."""
    pending = {path: Manifest.read(path / "export") for path in directories if is_finished(path)}
    needed: set[Path] = set()
    while found := [
        path for path, manifest in pending.items()
        if manifest.fingerprint in fingerprints or content_digest(path / "export") in digests
    ]:  # fmt: skip
        needed.update(found)
        digests |= {digest for path in found for digest in pending.pop(path).inputs.values()}
    return needed


def _reason(path: Path, needed: set[Path]) -> str | None:
    """Why a work directory can be removed unless it is held; None if it is needed."""
    if not (path / "export" / NAME).is_file():
        return "unfinished"
    if broken := damage(path / "export"):
        return f"damaged: {broken}"
    siblings = attempts(_first_of(path))
    if any(map(is_finished, siblings[siblings.index(path) + 1 :])):
        return "replaced by a later attempt"
    return None if path in needed else "nothing published was made from it"


def _with_sizes(removable: dict[Path, str]) -> Iterator[Leftover]:
    """The freed bytes. A file counts once, and only if all its hard links are removed."""
    files = {path: [f.lstat() for f in path.rglob("*") if not f.is_dir()] for path in removable}
    names = Counter((stat.st_dev, stat.st_ino) for stats in files.values() for stat in stats)
    for path, why in removable.items():
        whole = [s for s in files[path] if names.pop((s.st_dev, s.st_ino), 0) == s.st_nlink]
        yield Leftover(path, why, sum(stat.st_size for stat in whole))
