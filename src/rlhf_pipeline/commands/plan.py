import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from kedro.framework.project import pipelines, settings
from rich.console import Console

from rlhf_pipeline.commands.command import (
    CONFIGURATION,
    Command,
    console,
    gpus_option,
    pipeline_option,
    plain_table,
)
from rlhf_pipeline.commands.measure import measure
from rlhf_pipeline.config.base_model import BaseModelConfig, positions
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.stages import BLOCKS, in_bf16, prompt_policies
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.kedro_run.checks import check as check_parameters
from rlhf_pipeline.kedro_run.checks import check_values, for_gpus
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader, check_environment
from rlhf_pipeline.kedro_run.faults import batch_faults, length_faults, refuse
from rlhf_pipeline.pipelines.table import blocks_of
from rlhf_pipeline.runtime.job import as_json as plain
from rlhf_pipeline.sizing.fit import Fit, changed, find_fit, micro_batch_tokens, needs, size_text
from rlhf_pipeline.sizing.hardware import GIB, Hardware, named
from rlhf_pipeline.sizing.models import Shape, base_model_shape, find_model, published
from rlhf_pipeline.stages.launch.resources import (
    gpu_count,
    hardware_at_hand,
    rank_count,
    visible_gpus,
)


@dataclass(frozen=True)
class Plan:
    """What the stages of a pipeline need on some hardware."""

    model: str
    shape: Shape
    hardware: Hardware
    fits: Mapping[str, Fit]
    numbers: Mapping[str, int]
    """What `micro_batch_tokens: auto` stands for, by parameter."""


@click.command(cls=Command, params=[*CONFIGURATION])
@pipeline_option
@click.option("--model", metavar="NAME", help="Plan for this published model, such as opt-1.3b.")
@click.option("--gpu", metavar="NAME", help="Plan for this GPU: its name (a100-80) or its GiB.")
@gpus_option
@click.option(
    "--check",
    is_flag=True,
    help="Only check the parameters for that hardware, as `kedro run` does.",
)
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Run a few steps of each stage here, to the end; show time and memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def plan(
    project: Path, pipeline: str, model: str | None, gpu: str | None, gpus: str | None,
    check: bool, measured: bool, as_json: bool, env: str | None, conf_source: str | None,
    params: dict[str, Any],
) -> None:  # fmt: skip
    """Show the memory that each stage needs, and whether it fits.

    Nothing is loaded or downloaded. Without --gpu and --gpus, the plan is for this machine.

    With --measure, models and data are prepared, and the pipeline runs in miniature, from its first
    stage to its registration in an MLflow of its own. The table has the time and the memory that
    each stage will take, and the report of a finished run shows them beside the actual ones.
    """
    if measured:
        if model or gpu or gpus or check or as_json:
            raise click.UsageError(
                "--measure measures this machine: only configuration and pipeline go with it"
            )
        configuration = {"env": env, "conf_source": conf_source, "runtime_params": params}
        measure(project, configuration, pipeline, console())
        return
    conf = Path(conf_source or project / settings.CONF_SOURCE)
    check_environment(conf, env)
    if model is not None:  # the parameters are then not those of the embedded model
        params = params | {"base_model": {"path": find_model(model).path}}
    loader = LayeredConfigLoader(
        str(conf), env=env, runtime_params=params, **settings.CONFIG_LOADER_ARGS
    )
    hardware = None if gpu is None and gpus is None else named(gpu, gpus)
    if hardware is None:
        loader["parameters"] = for_gpus(loader["parameters"], visible_gpus())
    elif hardware.has_bf16:
        loader["parameters"] = in_bf16(loader["parameters"])
    nodes = {node.name for node in pipelines[pipeline].nodes}
    if check:
        ranks = check_on(hardware, loader, nodes)
        print(f"The parameters are valid for {ranks} rank{'s' * (ranks > 1)}.")
        return
    # The check accepts what only other machines can run.
    parameters = plain(check_values(loader["parameters"], loader.origin))
    found = make_plan(parameters, nodes, model=model, hardware=hardware)
    print(to_json(found)) if as_json else show(found, console(width=100))


def check_on(hardware: Hardware | None, loader: LayeredConfigLoader, nodes: Collection[str]) -> int:
    """Check the parameters as a run of the nodes does on some hardware; return the number of ranks.

    None stands for this machine. Raises ConfigError for parameters that fit neither each other nor
    the hardware.
    """
    gpus = gpu_count() if hardware is None else hardware.ranks
    blocks = check_parameters(
        loader["parameters"], gpus=gpus, origin=loader.origin, elsewhere=hardware is not None
    )
    if (model := published(str(blocks["base_model"].path))) is not None:
        limit = positions(model.config)
        refuse(length_faults(limit, blocks["split"], prompt_policies(blocks), blocks["evaluate"]))
    launch = blocks["launch"]
    ranks = rank_count(launch, gpus)
    if hardware is not None and ranks != hardware.world:
        mode = "local" if hardware.nodes == 1 else f"command with launch.nodes {hardware.nodes}"
        raise ConfigError(
            f"launch: found {ranks} ranks with mode {launch.mode} and processes {launch.processes},"
            f" expected {hardware.world}: {hardware.ranks} on each of {hardware.nodes} nodes. Fix: "
            f"set launch.processes to {hardware.ranks}, and launch.mode to {mode}"
        )
    refuse(batch_faults(blocks, nodes, ranks), loader.origin)
    return ranks


def make_plan(
    parameters: Mapping[str, Any],
    nodes: Collection[str],
    *,
    model: str | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Plan the stages among the nodes of a pipeline.

    `model` is the short name of a model that replaces `base_model`. Without `hardware`, the plan is
    for this machine. Raises ConfigError if nothing on this machine says the sizes of the model.
    """
    if model is not None:
        name, shape = model, find_model(model).shape
    else:
        config = BaseModelConfig.model_validate(parameters["base_model"])
        name = config.path or "the model of base_model.architecture"
        if (known := base_model_shape(config)) is None:
            raise ConfigError(
                f"base_model.path: found {config.path}, whose sizes are not known on this machine. "
                "Fix: set it to a local folder with a config.json, or name a model of about its "
                "size, such as --model opt-1.3b"
            )
        shape = known
    hardware = hardware or hardware_at_hand(LaunchConfig.model_validate(parameters["launch"]))
    found = micro_batch_tokens(parameters, shape, hardware)
    numbers = {f"{stage}.micro_batch_tokens": number for stage, number in found.items()}
    parameters = changed(parameters, numbers)
    named = blocks_of(nodes)
    stages = [stage for stage in BLOCKS if stage in named and parameters[stage] is not None]
    return Plan(
        model=name,
        shape=shape,
        hardware=hardware,
        fits={stage: find_fit(stage, parameters, shape, hardware) for stage in stages},
        numbers=numbers,
    )


def to_json(plan: Plan) -> str:
    """The plan for programs. Sizes are in bytes."""
    stages = [
        {
            "stage": stage,
            "peak": fit.memory.peak,
            "phase": fit.memory.largest.name,
            "certain": fit.memory.lower_bound,
            "available": needs(fit.memory, plan.hardware)[0].available,
            "fits": fit.fits,
            "changes": fit.changes,
            "libraries": fit.memory.libraries,
            "models": {model.name: fit.memory.parts_of(model) for model in fit.memory.models},
            "main_memory": fit.memory.main_of_node(plan.hardware.ranks),
        }
        for stage, fit in plan.fits.items()
    ]
    found = {
        "model": plan.model,
        "parameters": plan.shape.parameters,
        "hardware": asdict(plan.hardware),
        "automatic": plan.numbers,
        "stages": stages,
    }
    return json.dumps(found, indent=2)


def show(plan: Plan, output: Console) -> None:
    """Print the plan as a table."""
    hardware = plan.hardware
    nodes = f"{hardware.nodes} nodes of " if hardware.nodes > 1 else ""
    each = f", {size_text(hardware.rank_memory)} each" if hardware.rank_memory else ""
    kind = hardware.name if hardware.on_gpu else "CPU rank"
    output.print(
        f"[bold]{plan.model}[/]: {plan.shape.parameters:,} parameters, on {nodes}"
        f"{hardware.ranks} x {kind}{each}"
    )
    table = plain_table("stage", "phase", numbers=["GiB of a rank"])
    for stage, fit in plan.fits.items():
        memory = fit.memory
        held, name = memory.libraries + memory.held, f"[bold]{stage}"
        for phase in memory.phases:
            color = "bold" if phase is memory.largest else "default"
            size = f"[{color}]{(held + phase.total) / GIB:.2f}"
            table.add_row(name, f"{phase.model.removeprefix(f'{stage}.')} {phase.name}", size)
            name = ""
    output.print("", table, "")
    for name, number in plan.numbers.items():
        output.print(f"{name}: auto is {number} here", highlight=False, soft_wrap=True)
    for stage, fit in plan.fits.items():
        output.print(verdict(stage, fit), highlight=False, soft_wrap=True)


def verdict(stage: str, fit: Fit) -> str:
    """Whether a stage fits, and the change that makes it fit."""
    need = fit.before
    if need.available is None:
        return f"{stage}: needs {size_text(need.found)}; the memory of this machine is not known"
    if fit.fits:
        return f"[green]{stage} fits[/]: {size_text(need.found)} of {size_text(need.available)}"
    text = f"[red]{stage} does not fit[/]: {need}. "
    after = f"{size_text(fit.after.found)}{need.kind}"
    if fit.changes is None:
        return f"{text}No change of its parameters is enough ({after} at least). Fix: {fit.fix}"
    return f"{text}Fix: {fit.fix} ({after})"
