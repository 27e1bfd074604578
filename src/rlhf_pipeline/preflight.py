"""Checks of what the chosen nodes need, before a run and before each node."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from rlhf_pipeline.checks import length_faults, refuse
from rlhf_pipeline.config.base_model import BaseModelConfig, positions_in
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import TrainedReward, as_judges
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import PHASES
from rlhf_pipeline.config.stages import (
    BLOCKS,
    ON_PROMPTS,
    READERS,
    faults_without_reward_model,
    samplers,
    unused_phases,
)
from rlhf_pipeline.data.sources.synthetic import GOLD_SCORES
from rlhf_pipeline.data.split_report import require_true_answers
from rlhf_pipeline.datasets.artifact import PathDataset
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.pipelines.table import parameter_blocks, pipeline_of, policy_stages
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.fit import automatic, find_fit, micro_batch_tokens, size_text
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import base_model_shape
from rlhf_pipeline.stages.launch.resources import free_port, hardware_at_hand
from rlhf_pipeline.storage.store import Store

logger = logging.getLogger(__name__)


def check_root(root: str) -> None:
    """Check the folder for all results: its name, and whether files can be written there.

    Raises ConfigError with the fix.
    """
    found = [character for character in root if character in "*?[]{}:"]
    if found:
        raise ConfigError(
            f"root: found {found[0]!r} in {root!r}, which Kedro or PYTHONPATH reads as part of a "
            "pattern or a list. Fix: use a local folder without any of * ? [ ] { } :"
        )
    whole = Path(root).absolute()
    folder = next(path for path in (whole, *whole.parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        kind = "a folder that you cannot write to" if folder.is_dir() else "a file"
        raise ConfigError(
            f"root: found {root!r}, but {folder} is {kind}. Fix: set another folder with "
            "--params=root=FOLDER, or root in conf/local/globals.yml"
        )


def sized(blocks: dict[str, Any]) -> dict[str, Any]:
    """The blocks with the numbers that `micro_batch_tokens: auto` stands for on this machine.

    Recipes contain the numbers, so a stage can only resume with the one that it began with. Raises
    ConfigError if a number cannot be determined.
    """
    if not (stages := automatic(parameters := as_json(blocks))):
        return blocks
    if blocks["launch"].continue_from is not None:
        raise ConfigError(
            f"{stages[0]}.micro_batch_tokens: found auto with launch.continue_from, expected the "
            "number in the manifest or job.json of the earlier ranks. Fix: set it"
        )
    shape, hardware = base_model_shape(blocks["base_model"]), hardware_at_hand(blocks["launch"])
    return blocks | {
        stage: blocks[stage].model_copy(update={"micro_batch_tokens": number})
        for stage, number in micro_batch_tokens(parameters, shape, hardware).items()
    }


def check_pipeline(pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Check what the nodes of a run need: stores, prompts for each phase, a free port, memory.

    Raises the errors with which a run ends before its first stage.
    """
    warnings = check_stores(pipeline, catalog)
    nodes = {node.name for node in pipeline.nodes}
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    check_blocks(blocks, nodes)
    check_phases(blocks, nodes)
    has_gold = all(source.name in GOLD_SCORES for source in blocks["split"].sources)
    refuse(faults_without_reward_model(blocks, nodes, has_gold=has_gold))
    warnings += unused_phases(blocks["split"], nodes)
    launch = blocks["launch"]
    free_port(launch.master_port)
    if launch.memory_check != "off":
        refuses, hardware = launch.memory_check == "refuse", hardware_at_hand(launch)
        warnings += check_memory(as_json(blocks), nodes, hardware, refuses=refuses)
    for warning in warnings:
        logger.warning("%s", warning)


def check_stores(pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
    """Write to the store and to those of the pipeline's outputs; warn of versions after now.

    Raises StageError if a store fails.
    """
    entries = [catalog.get(name) for name in sorted(pipeline.all_outputs())]
    published = [entry for entry in entries if isinstance(entry, PathDataset)]
    for store in filter(None, [store_of(catalog), *(entry.store for entry in published)]):
        store.check()
    return [*filter(None, (entry.clock_fault() for entry in published))]


def store_of(catalog: CatalogProtocol) -> Store | None:
    """The store for stages and checkpoints. Configurations of earlier versions have no entry."""
    return catalog.load("store") if "store" in catalog else None


def check_inputs(
    node: str, inputs: Mapping[str, Any], nodes: Collection[str], blocks: Mapping[str, Any]
) -> None:
    """Check what a node of the run's `nodes` reads, before it runs.

    A model of the hub is first seen here, and so are the true answers in a split and the accuracy
    of a reward model.
    """
    split, evaluate, trained = (blocks[name] for name in ("split", "evaluate", "reward_model"))
    policies = {policy.stage: policy for policy in samplers(blocks)}
    for name in {"base_model", "sft_model"} & inputs.keys():
        faults = length_faults(positions_in(inputs[name]), split, [*policies.values()], evaluate)
        refuse(faults)
    if "split" in inputs:
        readers = [one for one in READERS["reward_model"] if one != "kto" and one in nodes]
        check_comparisons(inputs["split"], [one for one in readers if blocks[one] is not None])
        named = {*nodes, *(name.removeprefix("params:") for name in inputs)}
        asked = policy_stages().keys() & named or {"ppo"}
        rewards = [one for name in policies if name in asked for one in policies[name].rewards]
        judges = evaluate.judges if trained or evaluate.judges else as_judges(rewards)
        if "params:evaluate" in inputs:
            rewards = []
        require_true_answers(inputs["split"], rewards, judges)
    if node in policies and trained is not None and "reward_model" in inputs:
        check_gate(inputs["reward_model"], trained.gate, policies[node])


def check_comparisons(split: Path, stages: Sequence[str]) -> None:
    """Raise DataError if a split has no comparison for the stages that train on them: labelled
    answers fill the same phase."""
    report = json.loads((split / "report.json").read_text())
    if stages and not report["files"]["reward_model/train.arrow"]["rows"]:
        raise DataError(
            f"split: found no comparison, expected some for {' and '.join(stages)}. Fix: add a "
            "source of comparisons, or set reward_model to null and choose --pipeline=kto"
        )


def check_gate(reward_model: Path, gate: float | None, policy: PPOConfig | SampledConfig) -> None:
    """Check before a policy trains on it that a reward model is better than the gate on held-out
    comparisons.

    Raises StageError with the accuracy of the reward model.
    """
    used = any(isinstance(reward, TrainedReward) and reward.weight for reward in policy.rewards)
    if gate is None or not used:
        return
    metrics = Manifest.read(reward_model).metrics
    accuracy, lower, upper = (
        metrics[f"validation/accuracy{end}"] for end in ("", "_lower", "_upper")
    )
    if not lower > gate:
        raise StageError(
            f"reward_model.gate: found an accuracy of {accuracy:.1%} (95%: {lower:.1%} to "
            f"{upper:.1%}) on held-out comparisons, expected a lower end above {gate:.1%}. A "
            "policy would maximize noise. Fix: use more comparisons or train longer, or set "
            "reward_model.gate to null"
        )


def check_memory(
    parameters: Mapping[str, Any], nodes: Collection[str], hardware: Hardware, *, refuses: bool
) -> list[str]:
    """Check that the stages among the nodes fit; return warnings about those that may not.

    `parameters` are the blocks as plain values. A model whose sizes are not known is not checked,
    nor is a machine whose memory is not known. If what a stage certainly holds exceeds the memory,
    it raises ConfigError if `refuses`, and else warns.
    """
    shape = base_model_shape(BaseModelConfig.model_validate(parameters["base_model"]))
    limit = hardware.rank_memory
    if shape is None or limit is None:
        return []
    kind = "GPU" if hardware.on_gpu else "share of main memory"
    faults, warnings = [], []
    for stage in [name for name in BLOCKS if any(node.startswith(name) for node in nodes)]:
        if parameters[stage] is None:
            continue
        try:
            fit = find_fit(stage, parameters, shape, hardware)
        except ConfigError as error:  # the sizes of a teacher are not known
            warnings.append(f"{stage}: its memory is not checked: {error}")
            continue
        memory = fit.memory
        if memory.certain > limit:
            faults.append(
                f"{stage}: found {size_text(memory.certain)} of weights, gradients and optimizer "
                f"states on each rank, expected at most the {size_text(limit)} of its {kind}. Fix: "
                f"{fit.fix}; launch.memory_check=warn starts nevertheless"
            )
        elif not fit.fits:
            warnings.append(
                f"{stage}: the plan needs more memory than is safe: {fit.before}. Fix: {fit.fix} "
                "(kedro rlhf plan shows all of it)"
            )
    if refuses:
        refuse(faults)
    return faults + warnings


def check_blocks(blocks: Mapping[str, Any], nodes: Collection[str]) -> None:
    """Raise ConfigError if a policy among the nodes has no parameters."""
    for name in [name for name in ON_PROMPTS if name in nodes and blocks[name] is None]:
        others = [
            f"--pipeline={pipeline_of(one)}"
            for one in policy_stages()
            if one not in ON_PROMPTS or blocks[one] is not None
        ]
        raise ConfigError(
            f"{name}: found null, expected the parameters of the node {name}. Fix: set {name}, or "
            f"choose another pipeline: {' or '.join(others)}"
        )


def check_phases(blocks: Mapping[str, Any], nodes: Collection[str]) -> None:
    """Raise ConfigError if the nodes train a phase for which their split has no prompts."""
    weights = blocks["split"].weights
    trained = {node for node in nodes if blocks.get(node) is not None}
    empty = [
        phase
        for phase, weight in zip(PHASES, weights, strict=True)
        if weight == 0 and trained & {*READERS[phase]} and "split" in nodes
    ]
    if empty:
        raise ConfigError(
            f"split.weights: found {list(weights)}, with 0 for {', '.join(empty)}, expected "
            "more than 0 for each stage of the pipeline that trains. Fix: raise it, or choose a "
            "pipeline without this stage. Comparisons go to dpo and kto if reward_model is set, "
            f"or if {', '.join(ON_PROMPTS)} are null"
        )
