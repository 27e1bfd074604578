"""Checkpoints of an unfinished stage, from which it goes on when it is run again.

    checkpoints/step-00000012/actor/rank0.safetensors ...   what each rank's optimizer holds of this model
                              actor/engine.json             its schedule and counters
                              loop.json                     what else the training loop needs
                              seal.json                     size and SHA-256 of all of these, written last

A checkpoint is written under another name and renamed when it is whole. One that stands was whole once; its seal tells
whether it still is. Rows, random draws and learning rates are functions of the step, so nothing else is kept.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.stages.manifest import FileEntry, file_digest

logger = logging.getLogger(__name__)

PREFIX, SEAL = "step-", "seal.json"


def checkpoint_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"{PREFIX}{step:08d}"


def checkpoints_in(directory: Path) -> list[Path]:
    """Checkpoints that stand in a folder, oldest first."""
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.suffix != ".partial")


def newest_whole(directory: Path) -> int | None:
    """The step of the newest checkpoint that is undamaged, None where there is none; a damaged one is named and passed over."""
    for checkpoint in reversed(checkpoints_in(directory)):
        try:
            _verify(checkpoint)
        except ArtifactError as error:
            logger.warning("A checkpoint is passed over: %s", error)
            continue
        return int(checkpoint.name.removeprefix(PREFIX))
    return None


def seal(directory: Path) -> None:
    """Declare all files of a checkpoint written."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {
        path.relative_to(directory).as_posix(): asdict(FileEntry(path.stat().st_size, file_digest(path)))
        for path in files
    }
    (directory / SEAL).write_text(json.dumps(entries, indent=2))


def _verify(directory: Path) -> None:
    try:
        entries = {name: FileEntry(**entry) for name, entry in json.loads((directory / SEAL).read_text()).items()}
        for name, entry in entries.items():
            path = directory / name
            if path.stat().st_size != entry.size or file_digest(path) != entry.sha256:
                raise ArtifactError(f"{path} is not what was written")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{directory} is damaged ({error})") from error
