import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines, settings
from rich.console import Console

from rlhf_pipeline.commands.names import check_names
from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config_loader import LayeredConfigLoader, check_environment
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.preflight import check_values
from rlhf_pipeline.sizing.fit import Fit, find_fit, needs
from rlhf_pipeline.sizing.hardware import Hardware, named
from rlhf_pipeline.sizing.lengths import limits, measured
from rlhf_pipeline.sizing.models import base_model_shape, find_model
from rlhf_pipeline.sizing.shape import Shape
from rlhf_pipeline.sizing.stages import BLOCKS
from rlhf_pipeline.sizing.work import Work, stage_work
from rlhf_pipeline.stages.launch.layout import hardware_at_hand


@dataclass(frozen=True)
class Plan:
    """The answer."""

    model: str
    shape: Shape
    hardware: Hardware
    is_measured: bool
    """Whether rows and lengths are those of a published split."""
    fits: Mapping[str, Fit]
    """By stage."""
    works: Mapping[str, Work]
    """By stage."""


def plan(
    project: Path,
    console: Console,
    *,
    env: str | None,
    conf_source: str | None,
    params: dict[str, Any],
    pipeline: str,
    as_json: bool,
    **options: str | None,
) -> None:
    """Print the plan of a pipeline; `options` are those of `make_plan`."""
    from rlhf_pipeline.commands.plan_display import show

    check_names([pipeline], {})
    loader = loader_of(project, env, conf_source, params, options["model"])
    parameters, split = read(loader)
    nodes = {node.name for node in pipelines[pipeline].nodes}
    found = make_plan(parameters, nodes, split, **options)
    if as_json:
        print(to_json(found))
    else:
        show(found, console)


def loader_of(
    project: Path,
    env: str | None,
    conf_source: str | None,
    params: dict[str, Any],
    model: str | None,
) -> LayeredConfigLoader:
    """The configuration of `kedro run` with these options.

    `model` is the short name of a published model; the parameters are then not those of the
    embedded model. Raises ConfigError if the environment or the model is unknown.
    """
    conf = Path(conf_source or project / settings.CONF_SOURCE)
    check_environment(conf, env)
    if model is not None:
        params = params | {"base_model": {"path": find_model(model).path}}
    return LayeredConfigLoader(
        str(conf), env=env, runtime_params=params, **settings.CONFIG_LOADER_ARGS
    )


def read(loader: LayeredConfigLoader) -> tuple[dict[str, Any], Path]:
    """The parameters, and the folder of published splits.

    Unlike `kedro run`, it accepts those that only other machines can run. Raises ConfigError with
    the faults that every machine refuses.
    """
    parameters = loader["parameters"]
    check_values(parameters, loader.origin)
    return parameters, Path(loader["catalog"]["split"]["filepath"])


def make_plan(
    parameters: Mapping[str, Any],
    nodes: Collection[str],
    published: Path | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: str | None = None,
) -> Plan:
    """Plan the stages among the nodes of a pipeline.

    Args:
        parameters: the blocks as plain values, by name.
        nodes: names of the nodes.
        published: folder of the published splits, whose rows count if the parameters are theirs.
        model: short name of a published model in place of `base_model`.
        gpu: name or gibibytes of a GPU.
        gpus: such as 8x80. Neither: the hardware at hand.
    """
    name, shape = _model(parameters, model)
    if gpu is None and gpus is None:
        hardware = hardware_at_hand(LaunchConfig.model_validate(parameters["launch"]))
    else:
        hardware = named(gpu, gpus)
    split = SplitConfig.model_validate(parameters["split"])
    lengths = None if published is None else measured(published, split)
    known = limits(split) if lengths is None else lengths
    stages = [stage for stage in BLOCKS if any(node.startswith(stage) for node in nodes)]
    return Plan(
        model=name,
        shape=shape,
        hardware=hardware,
        is_measured=lengths is not None,
        fits={stage: find_fit(stage, parameters, shape, hardware, known) for stage in stages},
        works={stage: stage_work(stage, parameters, shape, hardware, known) for stage in stages},
    )


def _model(parameters: Mapping[str, Any], model: str | None) -> tuple[str, Shape]:
    if model is not None:
        return model, find_model(model).shape
    config = BaseModelConfig.model_validate(parameters["base_model"])
    shape = base_model_shape(config)
    if shape is None:
        raise ConfigError(
            f"base_model.path: found {config.path}, whose sizes are not known on this machine. "
            "Fix: set it to a local folder with a config.json, or name a model of about its size, "
            "such as --model opt-1.3b"
        )
    return config.path or "the model of base_model.architecture", shape


def to_json(plan: Plan) -> str:
    """The plan for programs. Sizes are in bytes."""
    return json.dumps(
        {
            "model": plan.model,
            "parameters": plan.shape.parameters,
            "hardware": asdict(plan.hardware),
            "lengths": "published split" if plan.is_measured else "limits",
            "stages": [_stage(plan, stage) for stage in plan.fits],
        },
        indent=2,
    )


def _stage(plan: Plan, stage: str) -> dict[str, Any]:
    fit, memory = plan.fits[stage], plan.fits[stage].memory
    return {
        "stage": stage,
        "peak": memory.peak,
        "phase": memory.largest.name,
        "certain": memory.certain,
        "available": needs(memory, plan.hardware)[0].available,
        "fits": fit.fits,
        "changes": fit.changes,
        "libraries": memory.libraries,
        "models": {model.name: memory.parts_of(model) for model in memory.models},
        "main_memory": memory.main_of_node(plan.hardware.ranks),
        **asdict(plan.works[stage]),
    }
