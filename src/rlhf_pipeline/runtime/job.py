"""The job as its program sees it: one `job.json` in the work directory, written by `stages.job`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.digests import file_digest
from rlhf_pipeline.runtime.manifest import folder_digest

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
    adjusted: dict[str, Any] = field(default_factory=dict)
    """Parameters changed after an out-of-memory failure, see `stages.run.halved`."""
    mixture: dict[str, list[str]] = field(default_factory=dict)
    """Inputs of the pipeline run that other parameters made, with the changes."""
    trust_remote_code: bool = False
    """Whether Python code that ships with a model may run: `base_model.trust_remote_code`."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the resume checkpoints (`runtime.checkpoint_files`) and of the best models."""
        return self.directory / "checkpoints"

    @property
    def export(self) -> Path:
        """Folder of the artifact. The artifact is finished once the folder contains a manifest."""
        return self.directory / "export"

    @property
    def metrics_file(self) -> Path:
        """Metrics as JSON lines, see `runtime.metrics_file`."""
        return self.directory / "metrics.jsonl"

    @property
    def deepspeed_file(self) -> Path:
        """DeepSpeed's configuration of each engine, written by distributed programs."""
        return self.directory / "deepspeed.json"

    def block(self, name: str, model: type[B]) -> B:
        """The parameter block `name`, validated as `model`."""
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


def as_json(config: Mapping[str, Block]) -> dict[str, Any]:
    """Parameter blocks as JSON types, by name."""
    return {name: block.model_dump(mode="json") for name, block in config.items()}
