"""What crosses the border between the pipeline and a launched program: one `job.json`, typed on both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.stages.trust import trusts_remote_code
from rlhf_pipeline.stages.workspace import write_whole

B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Program:
    """A stage's program: the module that is run, and by what."""

    module: str
    distributed: bool
    """True: started by the `deepspeed` launcher on every rank; False: one plain Python process."""
    libraries: tuple[str, ...] = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "peft")
    """Libraries whose version can change the result."""


PROGRAMS: dict[str, Program] = {
    "base_model": Program("rlhf_pipeline.models.base_model", distributed=False),
    "source": Program("rlhf_pipeline.data.ingest", distributed=False, libraries=("datasets", "pyarrow")),
    "split": Program(
        "rlhf_pipeline.data.prepare", distributed=False, libraries=("transformers", "tokenizers", "numpy", "pyarrow")
    ),
    "sft": Program("rlhf_pipeline.training.sft", distributed=True),
    "reward_model": Program("rlhf_pipeline.training.reward_model", distributed=True),
    "ppo": Program("rlhf_pipeline.training.ppo", distributed=True),
    "dpo": Program("rlhf_pipeline.training.dpo", distributed=True),
    "evaluate": Program("rlhf_pipeline.evaluation.compare", distributed=True),
    "evaluate_dpo": Program("rlhf_pipeline.evaluation.compare", distributed=True),
}


@dataclass(frozen=True)
class Job:
    """A stage to run: its parameters and its inputs, nothing else."""

    stage: str
    config: Mapping[str, Block]
    """Parameter blocks by their names in the parameter files, so that every name a user meets is the one in YAML."""
    inputs: Mapping[str, Path]
    seed: int
    identities: Mapping[str, str] = field(default_factory=dict)
    """Inputs that are no local files, by name: what tells one content from another, such as a commit on the hub or an
    object's ETag. No name is in `inputs` too."""
    modules: tuple[str, ...] = ()
    """Modules of this package that the program imports by a name it computes: their code counts as its own does."""

    @property
    def program(self) -> Program:
        """The program that does the work."""
        return PROGRAMS[self.stage]


@dataclass(frozen=True)
class LaunchedJob:
    """A job as its program sees it."""

    stage: str
    fingerprint: str
    seed: int
    config: dict[str, Any]
    inputs: dict[str, Path]
    digests: dict[str, str]
    """Content digest of each input, and the identity of each that is no local file."""
    directory: Path
    """The work directory, where job.json lies."""
    collective_timeout_s: float
    resume_from: int | None = None
    """The step whose checkpoint training goes on from; None: it starts from its beginning."""
    adjusted: dict[str, Any] = field(default_factory=dict)
    """Parameters that are not as configured, because that took too much memory: `smaller_batches.adjusted`."""
    trust_remote_code: bool = False
    """Whether code that lies beside a model's weights is executed: `base_model.trust_remote_code`."""

    @property
    def checkpoints(self) -> Path:
        """Where training leaves the best model, and what it can go on from: `stages.checkpoints`."""
        return self.directory / "checkpoints"

    @property
    def export(self) -> Path:
        """Where the artifact is built; it is finished when its manifest stands."""
        return self.directory / "export"

    @property
    def metrics_file(self) -> Path:
        """Where metrics go, see `rlhf_pipeline.stages.events.StageRun`."""
        return self.directory / "metrics.jsonl"

    @property
    def deepspeed_file(self) -> Path:
        """Where a distributed program leaves the DeepSpeed configuration of its engines."""
        return self.directory / "deepspeed.json"

    def block(self, name: str, model: type[B]) -> B:
        """The parameter block `name`, typed."""
        return model.model_validate(self.config[name])

    @classmethod
    def read(cls, path: Path) -> LaunchedJob:
        """Read what `write_job` wrote."""
        fields = json.loads(path.read_text())
        fields["inputs"] = {name: Path(value) for name, value in fields["inputs"].items()}
        return cls(directory=path.parent, **fields)


def as_json(config: Mapping[str, Block]) -> dict[str, Any]:
    """Parameter blocks as JSON types, by name."""
    return {name: block.model_dump(mode="json") for name, block in config.items()}


def write_job(
    job: Job,
    directory: Path,
    *,
    fingerprint: str,
    digests: Mapping[str, str],
    collective_timeout_s: float,
    resume_from: int | None,
    adjusted: Mapping[str, Any],
) -> Path:
    """Write `job.json` into the work directory; return its path."""
    fields = {
        "stage": job.stage,
        "fingerprint": fingerprint,
        "seed": job.seed,
        "config": as_json(job.config),
        "inputs": {name: str(path.resolve()) for name, path in job.inputs.items()},
        "digests": dict(digests),
        "collective_timeout_s": collective_timeout_s,
        "resume_from": resume_from,
        "adjusted": dict(adjusted),
        "trust_remote_code": trusts_remote_code(),
    }
    path = directory / "job.json"
    write_whole(path, json.dumps(fields, indent=2))
    return path
