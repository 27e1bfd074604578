"""What each node reads and writes, the stages, and the pipelines.

A new algorithm is a module and a name at the door `POLICY`.
"""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, NamedTuple

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import Door
from rlhf_pipeline.config.evaluate import RegisterConfig
from rlhf_pipeline.config.launch import LaunchConfig, ProgressConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.pipelines import evaluate, ppo, preparation, supervised
from rlhf_pipeline.stages.job import StageSpec, data_set_of, node_of


class Algorithm(NamedTuple):
    """A stage that trains a policy; its node writes the data set `<name>_model`."""

    spec: StageSpec
    train: Callable[..., Any]
    reads: str
    """The data sets that the node reads before its parameter block."""


ON_ROWS = "split sft_model"
BY_REWARDS = "split sft_model reward_model params:reward_model"
OWN = {
    "ppo": Algorithm(ppo.PPO, ppo.ppo, BY_REWARDS),
    "grpo": Algorithm(ppo.GRPO, ppo.grpo, BY_REWARDS),
    "distill": Algorithm(ppo.DISTILL, ppo.distill, ON_ROWS),
    "dpo": Algorithm(supervised.DPO, supervised.dpo, ON_ROWS),
    "kto": Algorithm(supervised.KTO, supervised.kto, ON_ROWS),
    "rejection": Algorithm(supervised.REJECTION, supervised.rejection, BY_REWARDS),
    "iterative_dpo": Algorithm(supervised.ITERATIVE_DPO, supervised.iterative_dpo, BY_REWARDS),
}
POLICY = Door("policy", dict.fromkeys(OWN, __name__))
"""Modules of other packages that train a policy, by the name of its stage, `SPEC`. The function of
this name is the node, which reads `READS` before its block."""

SHARED = ("base_model", "split", "sft", "reward_model")
"""Nodes that the pipelines of all policies share."""

PASSES_ON = {"sft": "base_model", "reward_model": "sft_model"}
"""The data set that a node of `SHARED` whose block is null passes on, by the name of the node."""

LAST = {"evaluate": "evaluation", "register": "registration", "report": "evaluation_page"}
"""What each node after the training of a policy publishes."""

RUN: dict[str, Any] = {}
"""What the nodes of the present run get beside data sets, by parameter: `stages`, and `project`,
the folder with the tracking database."""


def policy_stages() -> dict[str, Algorithm]:
    """The algorithms by the name of their stage.

    Raises ConfigError if the module of another package cannot be imported, or lacks a part.
    """
    return {name: OWN.get(name) or _of_package(name) for name in POLICY.names()}


def _of_package(name: str) -> Algorithm:
    module = POLICY.load(name)
    spec, missing = getattr(module, "SPEC", None), {name, "READS"} - vars(module).keys()
    if missing or not isinstance(spec, StageSpec) or spec.name != name:
        raise ConfigError(
            f"entry point {name} of rlhf_pipeline.policy: found {module.__name__}, expected a "
            f"module with SPEC, a StageSpec of this name, READS, and the function {name}. Fix: "
            "correct it, or uninstall its package"
        )
    return Algorithm(spec, getattr(module, name), module.READS)


def stage_specs() -> dict[str, StageSpec]:
    """Every stage that launches a program, by name."""
    policies = [policy.spec for policy in policy_stages().values()]
    candidates = [
        *(policy.name for policy in policies),
        evaluate.CHAMPION.name,
        evaluate.UNTOUCHED.name,
    ]
    prepared = [preparation.SOURCE, preparation.BASE_MODEL, preparation.SPLIT, supervised.SFT]
    evaluations = evaluate.TASKS, *map(evaluate.SPEC.for_candidate, candidates)
    judges = evaluate.JUDGE_SPLIT, evaluate.JUDGE
    bases = preparation.REWARD_BASE, ppo.CRITIC_BASE, ppo.TEACHER
    between = *bases, supervised.REWARD_MODEL, supervised.SAMPLE, *judges
    return {spec.name: spec for spec in (*prepared, *between, *policies, *evaluations)}


def parameter_blocks() -> dict[str, type[Block]]:
    """All parameter blocks by name; the other parameters are `seed`, `force`, `inputs`."""
    blocks: dict[str, type[Block]] = {"launch": LaunchConfig, "progress": ProgressConfig}
    for spec in stage_specs().values():
        blocks |= spec.blocks
    return blocks | {"register": RegisterConfig}


def blocks_of(nodes: Collection[str]) -> set[str]:
    """The parameter blocks of the stages that nodes run: `evaluate`, if one evaluates a policy."""
    return {block for spec in stage_specs().values() if spec.name in nodes for block in spec.blocks}


def kinds_of_results() -> dict[str, str]:
    """What the data sets that `LAST` publishes contain: evaluation, registration, or page."""
    return {data_set_of(kind, name): kind for name in policy_stages() for kind in LAST.values()}


def pipeline_of(policy: str) -> str:
    """The pipeline that trains and evaluates a policy, with all that it needs."""
    return "full" if policy == "ppo" else policy


def register_pipelines() -> dict[str, Pipeline]:
    """`full`, the default, trains by PPO; that of another policy by this instead. The others are
    parts of `full`."""
    nodes = _nodes()

    def pipeline(*names: str) -> Pipeline:
        return Pipeline([nodes[name] for name in names])

    whole = {
        pipeline_of(policy): pipeline(*SHARED, policy, *(node_of(name, policy) for name in LAST))
        for policy in policy_stages()
    }
    return {
        "data_preparation": pipeline("base_model", "split"),
        "sft": pipeline(*SHARED[:3]),
        "reward_model": pipeline(*SHARED),
        "ppo": pipeline("ppo"),
        "evaluation": pipeline(*LAST),
        **whole,
        "__default__": whole["full"],
    }


def _nodes() -> dict[str, Node]:
    stage = "params:seed stages"
    rows: list[tuple[Callable[..., Any], str, str]] = [  # function, what it reads and writes
        (preparation.base_model, f"params:base_model params:split {stage}", "base_model"),
        (preparation.split, f"base_model params:split params:reward_model {stage}", "split"),
        (supervised.sft, f"split base_model params:sft {stage}", "sft_model"),
        (
            supervised.reward_model,
            f"base_model {ON_ROWS} params:split params:reward_model {stage}",
            "reward_model",
        ),
    ]
    nodes = {name: _node(name, *row) for name, row in zip(SHARED, rows, strict=True)}
    for name, policy in policy_stages().items():
        models = f"sft_model {name}_model reward_model"
        evaluation, registration, page = (data_set_of(kind, name) for kind in LAST.values())
        blocks = f"params:register params:evaluate {stage} project"
        trained = f"split {models} params:reward_model params:{name} params:split"
        after: list[tuple[Callable[..., Any], str, str]] = [
            (evaluate.evaluate(policy.spec), f"{trained} params:evaluate {stage}", evaluation),
            (evaluate.register, f"{trained} {evaluation} workspace {blocks}", registration),
            (evaluate.report, f"{evaluation} {registration} {models} workspace", page),
        ]
        reads = f"{policy.reads} params:{name} params:policy_seed stages"
        nodes[name] = _node(name, policy.train, reads, f"{name}_model")
        for last, row in zip(LAST, after, strict=True):
            nodes[node_of(last, name)] = _node(node_of(last, name), *row)
    return nodes


def _node(name: str, function: Callable[..., Any], reads: str, writes: str) -> Node:
    """A node that reads data sets, and at the end what the present run has in `RUN`."""
    names = reads.split()
    own = [each for each in names if each in ("stages", "project")]

    @wraps(function)
    def in_run(*inputs: Any) -> Any:
        return function(*inputs, *(RUN[each] for each in own))

    return Node(in_run, [each for each in names if each not in own], writes, name=name)
