"""The driver's records: a stage, a job of it, its run, and what all stages of one `kedro run`
share; and the listeners that follow the stages."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig, ProgressConfig
from rlhf_pipeline.config.rewards import GOLD, REWARD_MODEL
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.runtime.files import write_atomically
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob, title
from rlhf_pipeline.stages.cache.workspace import RECIPE

Status = Literal["FINISHED", "FAILED", "KILLED"]
TRAINING_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "peft")


def node_of(stage: str, policy: str) -> str:
    """The node that evaluates, registers or reports a policy: `register_dpo`; PPO has no suffix."""
    return stage if policy == "ppo" else f"{stage}_{policy}"


def data_set_of(result: str, policy: str) -> str:
    """The data set that such a node writes: `dpo_evaluation`; PPO has no prefix."""
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
        if generator != "vllm":
            return self
        return replace(self, libraries=(*self.libraries, "vllm"))

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


@dataclass(frozen=True)
class StageRun(LaunchedJob):
    """One run of a stage, or the reuse of an earlier one: its job, and what only the driver has."""

    cached: bool = False
    """True: the result of an earlier run is reused, nothing is launched."""
    headline_metrics: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    """Everything that decides the result; the fingerprint is its digest."""

    @property
    def title(self) -> str:
        return title(self.stage, self.config)


class StageListener:
    """Follows the stages of a run. It handles its own errors and never makes a stage fail.

    A subclass defines the methods for the events that it needs. An instance of this class passes
    every event on to several listeners.
    """

    listeners: "tuple[StageListener, ...]" = ()

    def __init__(self, *listeners: "StageListener") -> None:
        self.listeners = listeners

    def stage_started(self, run: StageRun) -> None:
        """A program is about to be launched, or a result is reused."""
        for listener in self.listeners:
            listener.stage_started(run)

    def stage_phase(self, run: StageRun, heartbeat: Heartbeat) -> None:
        """The first rank has reported what it does; called several times a second."""
        for listener in self.listeners:
            listener.stage_phase(run, heartbeat)

    def stage_metrics(self, run: StageRun, records: list[dict[str, Any]]) -> None:
        """The metrics file has new records."""
        for listener in self.listeners:
            listener.stage_metrics(run, records)

    def stage_ended(self, run: StageRun, status: Status, metrics: dict[str, float]) -> None:
        """The stage ended; `metrics` are those of its manifest."""
        for listener in self.listeners:
            listener.stage_ended(run, status, metrics)


class StageStore(StageListener):
    """Copies of stages for other machines. This one has none; see `store.StoredStages`."""

    def manifest_copy(self, run: StageRun) -> Path | None:
        """A folder with a copy of the artifact's manifest; None if there is no artifact."""
        return None

    def fetch(self, run: StageRun) -> bool:
        """Download the finished artifact of a recipe into its work directory, if there is one."""
        return False

    def fetch_checkpoint(self, run: StageRun, local: int | None) -> int | None:
        """The step to resume from. Downloads the newest checkpoint if `local` is an older step."""
        return local

    def newest_step(self, run: StageRun) -> int | None:
        """The step of the newest checkpoint; None without one."""
        return None

    def close(self) -> None:
        """Wait for the uploads. Raises StageError with those that failed."""


@dataclass(frozen=True)
class RunContext:
    """One `kedro run`, or one `kedro rlhf status`."""

    workspace: Path  # folder of all work directories
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    forced: frozenset[str] = frozenset()
    """Stages that run again even if they are finished: the parameter `force`."""
    trust_remote_code: bool = False
    """Whether Python code that ships with a model may run: `base_model.trust_remote_code`."""
    mixture: Mapping[str, list[str]] = field(default_factory=dict)
    """Published inputs of the run that other parameters made, with the changes: the parameter
    `inputs` accepts them."""
    listener: StageListener = field(default_factory=StageListener)  # follows every stage
    stored: StageStore = field(default_factory=StageStore)  # it is also a listener


def forced_stages(value: Any, known: Collection[str]) -> frozenset[str]:
    """The stages to force: true for all, a list of names, or names separated by blanks.

    Raises ConfigError if a name is unknown, or the value is of another type.
    """
    if value is None or isinstance(value, bool):
        return frozenset(known if value else ())
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ConfigError(f"force: found {value!r}, expected true, a stage, or a list of stages")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"force: no stage {name!r}{suggestion(str(name), known)}; "
                f"the stages are {', '.join(known)}"
            )
    return frozenset(names)


def write_job(run: StageRun) -> None:
    """Write the recipe and `job.json` into the work directory."""
    values = {field.name: getattr(run, field.name) for field in fields(LaunchedJob)}
    values["inputs"] = {name: str(path.resolve()) for name, path in run.inputs.items()}
    del values["directory"]
    write_atomically(run.directory / RECIPE, json.dumps(run.recipe, indent=2))
    write_atomically(run.directory / "job.json", json.dumps(values, indent=2))
