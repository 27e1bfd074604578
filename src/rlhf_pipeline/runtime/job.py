"""The job as its program sees it, and the resume checkpoints in its work directory.

    checkpoints/step-00000012/actor/rank0.safetensors ...   each rank's optimizer state of one model
                              actor/engine.json             learning-rate schedule and counters
                              loop.json                     state of the training loop
                              seal.json                     size and SHA-256 of the files above

The driver writes one `job.json` (`stages.job`). A checkpoint is written under another name and
renamed when it is complete. Its seal, written last, detects later damage. Rows, random draws and
learning rates are functions of the step, so a checkpoint does not contain them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.manifest import FileEntry, file_digest, folder_digest

logger = logging.getLogger(__name__)
SEAL = "seal.json"
LAST_SEAL = "last_checkpoint.json"
"""The seal of the last checkpoint of a finished training, which has no checkpoints any more."""
JUDGE_REPLIES = "judge_replies"
"""Folder of the workspace with all replies of chat models. Its time is that of the last use."""
DRY_RUNS = ".dry_runs"
"""Folder of the workspace that remembers what was looked at before a run, and had no fault."""
_PREFIX = "step-"

B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class LaunchedJob:
    """Everything that a program needs to know."""

    stage: str
    fingerprint: str
    seed: int
    config: dict[str, Any]
    """Parameter blocks by name, as JSON types."""
    inputs: dict[str, Path]
    digests: dict[str, str]
    """Content digest of each input, and the identity of each input that is not a local file."""
    directory: Path
    """The work directory, which contains job.json."""
    collective_timeout_s: float
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that can change the result."""
    resume_from: int | None = None
    """The step of the checkpoint to resume from. None: start from the first step."""
    mixture: dict[str, list[str]] = field(default_factory=dict)
    """Inputs of the pipeline run that other parameters made, with the changes."""
    trust_remote_code: bool = False
    """Whether Python code that ships with a model may run: `base_model.trust_remote_code`."""
    answers: int = 0
    """Held-out prompts whose answers each evaluation of training shows: `progress.answers`."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the resume checkpoints and of the best models."""
        return self.directory / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder of the artifact. The artifact is finished once the folder contains a manifest."""
        return self.directory / "export"

    @property
    def metrics_file(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def deepspeed_file(self) -> Path:
        """DeepSpeed's configuration of each engine, written by distributed programs."""
        return self.directory / "deepspeed.json"

    def block(self, name: str, model: type[B]) -> B:
        return model.model_validate(self.config[name])

    def expect_unchanged(self, name: str, path: Path) -> None:
        """Raise ArtifactError if an input that was digested for the plan has changed meanwhile."""
        found = file_digest(path) if path.is_file() else folder_digest(path)
        if self.digests.get(name, found) != found:
            raise ArtifactError(
                f"{path}: found other bytes than when the stage was planned. Fix: run the same "
                "command again, and change nothing there until the stage has loaded it"
            )

    @classmethod
    def read(cls, path: Path) -> "LaunchedJob":
        fields = json.loads(path.read_text())
        fields["inputs"] = {name: Path(value) for name, value in fields["inputs"].items()}
        return cls(directory=path.parent, **fields)


def title(stage: str, config: Mapping[str, Any]) -> str:
    """The name of a stage, with the source, the fold or the round that tells its jobs apart."""
    if stage == "source":
        return f"source {config['source']['name']}"
    if "fold" in config:
        return f"{stage} {config['fold']['number'] + 1} of {config['fold']['of']}"
    return f"{stage} round {config['table']['round']}" if "table" in config else stage


def as_json(config: Mapping[str, Block | None]) -> dict[str, Any]:
    """Parameter blocks as JSON types, by name; null for a block that is None."""
    return {name: block and block.model_dump(mode="json") for name, block in config.items()}


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
