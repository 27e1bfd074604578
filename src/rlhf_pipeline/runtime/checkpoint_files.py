"""Resume checkpoints on disk.

    checkpoints/step-00000012/actor/rank0.safetensors ...   each rank's optimizer state of one model
                              actor/engine.json             learning-rate schedule and counters
                              loop.json                     state of the training loop
                              seal.json                     size and SHA-256 of the files above

A checkpoint is written under another name and renamed when it is complete. Its seal, written last,
detects later damage. Each rank digests its own file while it writes it. Rows, random draws and
learning rates are functions of the step, so a checkpoint does not contain them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.digests import FileEntry

logger = logging.getLogger(__name__)

SEAL = "seal.json"
_PREFIX = "step-"


def checkpoint_path(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"{_PREFIX}{step:08d}"


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(directory.glob(_PREFIX + 8 * "[0-9]"))


def newest_step(directory: Path) -> int | None:
    """The step of the newest checkpoint, damaged or not; None without one."""
    found = list_checkpoints(directory)
    return checkpoint_step(found[-1]) if found else None


def newest_valid_step(directory: Path) -> int | None:
    """The step of the newest undamaged checkpoint, or None. Damaged checkpoints are reported.

    Raises StageError if a file cannot be read, which may be no damage.
    """
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            _verify(checkpoint)
        except ArtifactError as error:
            logger.warning("skipping a damaged checkpoint: %s", error)
            continue
        return checkpoint_step(checkpoint)
    return None


def seal(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Mark a checkpoint as complete. `files` are the entries of its files, by relative path."""
    entries = {name: asdict(entry) for name, entry in sorted(files.items())}
    (directory / SEAL).write_text(json.dumps(entries, indent=2))


def _verify(directory: Path) -> None:
    try:
        entries = json.loads((directory / SEAL).read_text())
        for name, entry in entries.items():
            if not FileEntry(**entry).matches(directory / name):
                raise ArtifactError(f"{directory / name} has changed since it was written")
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{directory} is damaged ({error})") from error
    except OSError as error:
        raise StageError(
            f"{directory}: found {error}, expected a checkpoint that can be read. Nothing was "
            "changed. Fix: repeat the command when the disk answers"
        ) from error
