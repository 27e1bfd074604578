"""What each node reads and writes, the stages, and the pipelines.

A new algorithm is a module and one line in `POLICIES`.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.pipelines import base_model, evaluate, register, report, reward_model, sft, split
from rlhf_pipeline.stages.job import PROJECT, STAGES, StageSpec, data_set_of, node_of

POLICIES = (
    ("rlhf_pipeline.pipelines.ppo", "split sft_model reward_model"),
    ("rlhf_pipeline.pipelines.dpo", "split sft_model"),
)
"""Modules that train a policy, and the data sets that they read. `SPEC` is the stage, and the
function with its name is the node, which writes the data set `<name>_model`."""

SHARED = ("base_model", "split", "sft", "reward_model")
"""Nodes that the pipelines of all policies share."""

LAST = ("evaluate", "register", "report")
"""Nodes after the training of a policy."""


def policy_stages() -> dict[str, ModuleType]:
    """The modules of `POLICIES` by the name of their stage."""
    modules = [import_module(name) for name, _ in POLICIES]
    return {module.SPEC.name: module for module in modules}


def stage_specs() -> dict[str, StageSpec]:
    """Every stage that launches a program, by name."""
    policies = [module.SPEC for module in policy_stages().values()]
    candidates = [*(policy.name for policy in policies), evaluate.CHAMPION.name]
    prepared = [split.SOURCE, base_model.SPEC, split.SPEC, sft.SPEC, reward_model.SPEC]
    evaluations = map(evaluate.SPEC.for_candidate, candidates)
    return {spec.name: spec for spec in (*prepared, *policies, *evaluations)}


def parameter_blocks() -> dict[str, type[Block]]:
    """All parameter blocks by name; the other parameters are `seed`, `force`, `inputs`."""
    blocks: dict[str, type[Block]] = {"launch": LaunchConfig}
    for spec in stage_specs().values():
        blocks |= spec.blocks
    return blocks | {"register": RegisterConfig}


def pipeline_of(policy: str) -> str:
    """The pipeline that trains and evaluates a policy, with all that it needs."""
    return "full" if policy == "ppo" else policy


def register_pipelines() -> dict[str, Pipeline]:
    """`full`, the default, trains by PPO; `dpo` by DPO instead. The others are parts of `full`."""
    nodes = _nodes()

    def pipeline(*names: str) -> Pipeline:
        return Pipeline([nodes[name] for name in names])

    whole = {
        pipeline_of(policy): pipeline(*SHARED, policy, *(node_of(name, policy) for name in LAST))
        for policy in policy_stages()
    }
    return {
        "data_preparation": pipeline("base_model", "split"),
        "sft": pipeline("sft"),
        "reward_model": pipeline("reward_model"),
        "ppo": pipeline("ppo"),
        "evaluation": pipeline(*LAST),
        **whole,
        "__default__": whole["full"],
    }


def _nodes() -> dict[str, Node]:
    """Every node by name."""
    stage = f"params:seed {STAGES}"
    rows: list[tuple[Callable[..., Any], str, str]] = [  # function, what it reads and writes
        (base_model.base_model, f"params:base_model params:split {stage}", "base_model"),
        (split.split, f"base_model params:split {stage}", "split"),
        (sft.sft, f"split base_model params:sft {stage}", "sft_model"),
        (reward_model.reward_model, f"split sft_model params:reward_model {stage}", "reward_model"),
    ]
    named = [(*row, name) for row, name in zip(rows, SHARED, strict=True)]
    for (name, module), (_, reads) in zip(policy_stages().items(), POLICIES, strict=True):
        models = f"sft_model {name}_model reward_model"
        evaluation, registration, page = (
            data_set_of(each, name) for each in ("evaluation", "registration", "evaluation_page")
        )
        blocks = f"params:register params:split params:evaluate {stage} workspace {PROJECT}"
        after: list[tuple[Callable[..., Any], str, str]] = [
            (evaluate.evaluate(module.SPEC), f"split {models} params:evaluate {stage}", evaluation),
            (register.register, f"split {models} {evaluation} {blocks}", registration),
            (report.report, f"{evaluation} {registration} {models}", page),
        ]
        train = getattr(module, name)
        named += [(train, f"{reads} params:{name} {stage}", f"{name}_model", name)]
        named += [(*row, node_of(last, name)) for row, last in zip(after, LAST, strict=True)]
    return {
        name: Node(function, reads.split(), writes, name=name)
        for function, reads, writes, name in named
    }
