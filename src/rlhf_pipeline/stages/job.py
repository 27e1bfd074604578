"""What a stage is, a stage to run, and the `job.json` that its program reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import GOLD, REWARD_MODEL
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.stages.cache.workspace import RECIPE
from rlhf_pipeline.stages.events import StageRun

STAGES = "params:stages"
"""The catalog entry from which every node gets its `Stages`. `params:` keeps it out of `kedro viz`,
like the parameters."""

PROJECT = "params:project"
"""The catalog entry with the project folder, which contains the tracking database."""

TRAINING_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "peft")


def node_of(stage: str, policy: str) -> str:
    """The node that evaluates, registers or reports a policy, such as `evaluate_dpo`.

    The nodes of PPO have no suffix.
    """
    return stage if policy == "ppo" else f"{stage}_{policy}"


def data_set_of(result: str, policy: str) -> str:
    """The data set that such a node writes, such as `dpo_evaluation`.

    Those of PPO have no prefix.
    """
    return result if policy == "ppo" else f"{policy}_{result}"


@dataclass(frozen=True)
class StageSpec:
    """One stage. `pipelines.table` lists the stages of the project."""

    name: str
    """Name of the stage, its node, its work directory and, for most stages, its parameter block."""
    program: str
    """Name of the module to launch."""
    distributed: bool = True
    """True: the `deepspeed` launcher starts it on every rank. False: one plain Python process."""
    libraries: tuple[str, ...] = TRAINING_LIBRARIES
    """Libraries whose version can change the result; part of the fingerprint."""
    blocks: Mapping[str, type[Block]] = field(default_factory=dict)
    """Top-level parameter blocks that the stage introduces, by name."""
    batch_sizes: tuple[str, ...] = ()
    """Parameters that are global batch sizes: each must divide evenly among the ranks."""
    headline_metrics: tuple[str, ...] = ()
    """The two or three metrics that the progress display shows."""

    def answering_by(self, generator: str) -> "StageSpec":
        """The stage whose policy answers by a generator: the version of vLLM counts."""
        used = ("vllm",) if generator == "vllm" else ()
        return replace(self, libraries=(*self.libraries, *used))

    def for_candidate(self, candidate: str) -> "StageSpec":
        """The evaluation of a candidate policy."""
        rates = (f"win_rate/{judge}" for judge in (REWARD_MODEL, GOLD))
        return replace(
            self,
            name=node_of(self.name, candidate),
            headline_metrics=("sft/score", "base_model/score", f"{candidate}/score", *rates),
        )


@dataclass(frozen=True)
class Job:
    """A stage to run, its parameters and its inputs."""

    spec: StageSpec
    config: Mapping[str, Block]
    """Parameter blocks by their names in the parameter files, which messages use as well."""
    inputs: Mapping[str, Path]
    seed: int
    identities: Mapping[str, str] = field(default_factory=dict)
    """Inputs that are not local files, by name: an identity of their content, such as a commit on
    the hub or the ETag of an object. The names differ from those of `inputs`."""
    modules: tuple[str, ...] = ()
    """Modules that the program imports by a computed name; part of the fingerprint."""


class Stages(Protocol):
    """Runs a node's stage (`StageRunner`), or predicts what would happen (`Planner`)."""

    def run(self, job: Job) -> Path:
        """Return the stage's artifact, or the path where it will be."""


def write_job(run: StageRun) -> None:
    """Write the recipe and `job.json` into the work directory."""
    values = {field.name: getattr(run, field.name) for field in fields(LaunchedJob)}
    values["inputs"] = {name: str(path.resolve()) for name, path in run.inputs.items()}
    del values["directory"]
    write_atomically(run.directory / RECIPE, json.dumps(run.recipe, indent=2))
    write_atomically(run.directory / "job.json", json.dumps(values, indent=2))
