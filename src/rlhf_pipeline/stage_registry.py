"""The stages of the project. A new algorithm is a package and one line in `POLICIES`."""

from importlib import import_module
from types import ModuleType

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.register import RegisterConfig
from rlhf_pipeline.pipelines import base_model, evaluate, reward_model, sft, split
from rlhf_pipeline.stages.job import StageSpec

POLICIES = (
    "rlhf_pipeline.pipelines.ppo",
    "rlhf_pipeline.pipelines.dpo",
)
"""Packages or modules that train a policy from the SFT model: `SPEC` and `create_pipeline`."""


def policy_stages() -> dict[str, ModuleType]:
    """The packages of `POLICIES` by the name of their stage."""
    packages = [import_module(name) for name in POLICIES]
    return {package.SPEC.name: package for package in packages}


def stage_specs() -> dict[str, StageSpec]:
    """Every stage that launches a program, by name."""
    policies = [package.SPEC for package in policy_stages().values()]
    candidates = [*(policy.name for policy in policies), evaluate.CHAMPION.name]
    evaluations = [evaluate.SPEC.for_candidate(name) for name in candidates]
    specs = [
        split.SOURCE,
        base_model.SPEC,
        split.SPEC,
        sft.SPEC,
        reward_model.SPEC,
        *policies,
        *evaluations,
    ]
    return {spec.name: spec for spec in specs}


def parameter_blocks() -> dict[str, type[Block]]:
    """All parameter blocks by name; the other parameters are `seed`, `force`, `inputs`."""
    blocks: dict[str, type[Block]] = {"launch": LaunchConfig}
    for spec in stage_specs().values():
        blocks |= spec.blocks
    return blocks | {"register": RegisterConfig}
