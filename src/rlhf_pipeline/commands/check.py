"""`kedro rlhf plan --check`: a dry run of every stage, without its model, data and GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline
from rich.console import Console

from rlhf_pipeline.checks import check as check_parameters
from rlhf_pipeline.checks import length_faults, refuse
from rlhf_pipeline.commands.command import check_names
from rlhf_pipeline.commands.plan import loader_of, model_shape
from rlhf_pipeline.config.base_model import BaseModelConfig, positions
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.data.record_files import RowCounts
from rlhf_pipeline.errors import ConfigError, PipelineError, StageError
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.sizing.hardware import Hardware, named
from rlhf_pipeline.sizing.models import published
from rlhf_pipeline.stages.cache.planning import Planner
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import Job, write_job
from rlhf_pipeline.stages.launch.resources import gpu_count, rank_count

NO_COMMIT = "0" * 40
"""Stands in for the newest commit of a repository, for which a run asks the hub."""


class DryRun(Planner):
    """Plans every stage as new, writes its `job.json`, and reads it back as its program does."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.jobs: dict[str, Path] = {}
        """`job.json` by stage; of stage source, the last one."""

    def run(self, job: Job) -> Path:
        """Write the job and validate what its program reads; return where its result will be."""
        run = self.plan(job).run
        run.export.mkdir(parents=True, exist_ok=True)
        write_job(run)
        self.jobs[run.stage] = run.directory / "job.json"
        read = LaunchedJob.read(self.jobs[run.stage])
        for name, block in job.config.items():
            if read.block(name, type(block)) != block:
                raise StageError(f"{name}: found other values in job.json than in the parameters")
        if job.spec.name == "source":
            RowCounts(rows=1).write(run.export)  # the node reads it
        return run.export


def check(
    project: Path, console: Console, *, pipeline: str, gpu: Any, gpus: Any, **configuration: Any
) -> None:
    """Print a line for each stage of a pipeline; the options are those of `kedro rlhf plan`.

    Raises:
        ConfigError: the parameters fit neither each other nor the hardware.
        StageError: DeepSpeed refuses the settings of an engine.
    """
    check_names([pipeline], {})
    loader = loader_of(project, **configuration)
    hardware = None if gpu is None and gpus is None else named(gpu, gpus)
    parameters, nodes = loader["parameters"], pipelines[pipeline]
    with TemporaryDirectory(prefix="rlhf-check-") as name, environment_of(hardware):
        folder = Path(name)
        jobs, ranks = dry_run(parameters, hardware, nodes, folder, loader.origin)
        machine = {"hidden_size": model_shape(parameters)[1].hidden, "on_gpu": gpu_count() > 0}
        engines = _accepted(jobs, {"ranks": ranks, "machine": machine}, folder)
    launched = "1 rank" if ranks == 1 else f"{ranks} ranks"
    for stage in jobs:
        where = launched if stage_specs()[stage].distributed else "1 process"
        accepted = f"; DeepSpeed accepts {', '.join(engines[stage])}" if engines[stage] else ""
        console.out(f"{stage:<14} {where:<10} job.json is valid{accepted}", highlight=False)


def dry_run(
    parameters: Mapping[str, Any],
    hardware: Hardware | None,
    pipeline: Pipeline,
    folder: Path,
    origin: Callable[[str], str | None] = lambda name: None,
) -> tuple[dict[str, Path], int]:
    """Write the job of each stage below a folder; return them by stage, and the number of ranks.

    Call it in `environment_of(hardware)`; without hardware, the run is for this machine. `origin`
    names the file that sets a parameter. Raises ConfigError if the parameters fit neither each
    other nor the hardware.
    """
    gpus = gpu_count()
    is_elsewhere = hardware is not None
    blocks = check_parameters(parameters, gpus=gpus, origin=origin, elsewhere=is_elsewhere)
    if (model := published(str(blocks["base_model"].path))) is not None:
        limit = positions(model.config)
        refuse(length_faults(limit, blocks["split"], blocks["ppo"], blocks["evaluate"]))
    launch: LaunchConfig = blocks["launch"]
    ranks = rank_count(launch, gpus)
    if hardware is not None and ranks != hardware.world:
        raise ConfigError(
            f"launch: found {ranks} ranks with mode {launch.mode} and processes {launch.processes},"
            f" expected {hardware.world}: {hardware.ranks} on each of {hardware.nodes} nodes. Fix: "
            f"set launch.processes to {hardware.ranks}, and launch.mode to "
            + ("local" if hardware.nodes == 1 else f"command with launch.nodes {hardware.nodes}")
        )
    planner = DryRun(RunContext(workspace=folder, launch=launch))
    values: dict[str, Any] = {f"params:{name}": block for name, block in blocks.items()}
    values |= {"params:seed": parameters["seed"], "params:stages": planner}
    values["params:base_model"] = _at_commit(blocks["base_model"])
    values["params:split"] = _sources_at_commits(blocks["split"])
    for node in pipeline.nodes:
        if node.name in stage_specs():
            try:
                values[node.outputs[0]] = node.func(*(values[name] for name in node.inputs))
            except PipelineError as error:
                raise type(error)(f"stage {node.name}: {error.message}") from error
    return planner.jobs, ranks


@contextmanager
def environment_of(hardware: Hardware | None) -> Iterator[None]:
    """The environment of the first node of some hardware.

    None: this machine, without a change.
    """
    if hardware is None:
        yield
        return
    gpus = range(hardware.ranks) if hardware.on_gpu else ()
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, gpus))):
        os.environ.pop("DS_ACCELERATOR", None)
        yield


def _at_commit(config: BaseModelConfig) -> BaseModelConfig:
    """A base model that is identified without asking the hub."""
    if config.path is None or Path(config.path).exists():
        return config
    return config.model_copy(update={"revision": NO_COMMIT})


def _sources_at_commits(config: SplitConfig) -> SplitConfig:
    """Sources that are identified without asking the hub."""

    def pinned(source: SourceConfig) -> SourceConfig:
        is_on_hub = source.path is None and source.name != "synthetic"
        return source.model_copy(update={"revision": NO_COMMIT}) if is_on_hub else source

    update: dict[str, Any] = {"sources": tuple(map(pinned, config.sources))}
    if config.pretraining is not None:
        texts = tuple(map(pinned, config.pretraining.sources))
        update["pretraining"] = config.pretraining.model_copy(update={"sources": texts})
    return config.model_copy(update=update)


def _accepted(
    jobs: Mapping[str, Path], request: dict[str, Any], folder: Path
) -> dict[str, dict[str, str | None]]:
    """The engines of each stage, by a program that imports DeepSpeed.

    Raises StageError if DeepSpeed refuses one, or the program fails.
    """
    source, target = folder / "request.json", folder / "answer.json"
    source.write_text(json.dumps(request | {"jobs": list(map(str, jobs.values()))}))
    program = "rlhf_pipeline.distributed.dry_run"
    command = [sys.executable, "-P", "-m", program, str(source), str(target)]
    done = subprocess.run(
        command,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise StageError(f"the settings of DeepSpeed were not checked: {reason}")
    engines: dict[str, dict[str, str | None]] = json.loads(target.read_text())
    for stage, refusals in engines.items():
        for name, refusal in refusals.items():
            if refusal is not None:
                raise StageError(
                    f"stage {stage}: DeepSpeed {version('deepspeed')} refuses the settings of "
                    f"{name}: {refusal}. Fix: change them, or install the version that was tested"
                )
    return engines
