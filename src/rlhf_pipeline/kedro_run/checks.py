"""When each check runs: on the parameters, before a run, and before each node.

Checks of the parameters are in `faults`, and trials of rows, functions and models in `dry_run`.
"""

import errno
import json
import logging
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from rlhf_pipeline.config.base_model import positions, saved_config
from rlhf_pipeline.config.block import leaves, meant, validated
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import JUDGE_MODEL, TrainedReward, as_judges
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import NEEDS
from rlhf_pipeline.config.stages import (
    OPTIONAL,
    adapter_rates,
    faults_without_reward_model,
    in_bf16,
    prompt_policies,
    slow_precisions,
    split_in_use,
    trainers_of_phase,
)
from rlhf_pipeline.data.sources.synthetic import GOLD_SCORES
from rlhf_pipeline.data.split_report import require_true_answers
from rlhf_pipeline.datasets.artifact import PathDataset
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.kedro_run.dry_run import CAREFUL, FEWEST, dry_run
from rlhf_pipeline.kedro_run.faults import (
    Origin,
    batch_faults,
    block_faults,
    critic_faults,
    evaluation_faults,
    length_faults,
    machine_faults,
    memory_faults,
    own_bases,
    path_faults,
    phase_faults,
    policy_faults,
    refuse,
    source_faults,
)
from rlhf_pipeline.pipelines.table import blocks_of, parameter_blocks, policy_stages, stage_specs
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.fit import automatic, micro_batch_tokens
from rlhf_pipeline.sizing.hardware import at_hand
from rlhf_pipeline.sizing.models import base_model_shape
from rlhf_pipeline.stages.job import forced_stages
from rlhf_pipeline.stages.launch.resources import free_port, hardware_at_hand, node_layout

logger = logging.getLogger(__name__)

OTHERS = ("seed", "policy_seed", "force", "inputs")
"""Parameters that are not blocks."""

CONF = "params:conf"
"""The entry of the catalog with the loader of the configuration, which knows who set what."""


def check(
    parameters: Mapping[str, Any],
    *,
    gpus: int,
    origin: Origin = lambda name: None,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Check all parameters of a run on a machine with some GPUs; return the validated blocks.

    `parameters` are the blocks as plain values, by name, and `origin` tells which file sets a
    parameter. With `elsewhere`, the machine is another one, whose libraries are not known. Raises
    ConfigError with one line for each fault.
    """
    blocks = check_values(parameters, origin)
    try:
        ranks = node_layout(blocks["launch"], gpus).ranks
    except ConfigError as error:
        refuse([str(error)], origin)
    split, evaluate, bases = blocks["split"], blocks["evaluate"], own_bases(blocks)
    policies, values = prompt_policies(blocks), dict(leaves(as_json(blocks)))
    texts = split.pretraining.readings() if split.pretraining else []
    found = (
        machine_faults(values, ranks[0], gpus, elsewhere=elsewhere),
        source_faults("split.sources", split.readings(), wants_text=False),
        *(path_faults(f"{place}.path", base.path) for place, base in bases.items()),
        *(
            length_faults(positions(base.configuration), split, policies, evaluate)
            for base in bases.values()
        ),
        *(policy_faults(policy, blocks, sum(ranks)) for policy in policies),
        evaluation_faults(evaluate, policies),
        source_faults("split.pretraining.sources", texts, wants_text=True),
    )
    refuse(chain(*found), origin)
    return blocks


def for_gpus(parameters: dict[str, Any], gpus: list[str]) -> dict[str, Any]:
    """The parameters with bf16 where nobody set a precision, if these GPUs have it. It is said."""
    if not gpus or not at_hand([1], gpus).has_bf16:
        return parameters
    found = in_bf16(parameters)
    if found != parameters:
        logger.info("precision: bf16 where none is set, for this machine's GPUs have it")
    return found


def check_values(
    parameters: Mapping[str, Any], origin: Origin = lambda name: None
) -> dict[str, Any]:
    """Check each parameter by itself, without a look at machine and files; return the blocks."""
    kinds, blocks = parameter_blocks(), dict[str, Any]()
    known = kinds | dict.fromkeys(OTHERS)
    faults = [
        f"{name}: unknown parameter{meant(name, known)}; the parameters are {', '.join(known)}"
        for name in parameters
        if name not in (*known, "root", "store")  # the catalog reads these two
    ]
    for name, kind in kinds.items():
        value = parameters.get(name, OPTIONAL.get(name, {}))
        if value is None and name in OPTIONAL:
            blocks[name] = None
            continue
        blocks[name], found = validated(name, kind, value)
        faults += found
    for name, seed in {name: parameters.get(name) for name in ("seed", "policy_seed")}.items():
        is_number = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
        if not is_number and (seed, name) != (None, "policy_seed"):
            faults.append(f"{name}: found {seed!r}, expected a whole number >= 0")
    if parameters.get("inputs") not in (None, "newest"):
        faults.append(f"inputs: found {parameters['inputs']!r}, expected newest or null")
    try:
        forced_stages(parameters.get("force"), stage_specs())
    except ConfigError as error:
        faults.append(str(error))
    refuse(faults, origin)
    if held_back := blocks["split"].held_back:
        fault = f"split.held_back: found {held_back:g}, expected none, for a run sets it"
        refuse([f"{fault}. Fix: set evaluate.judge_model.held_back"], origin)
    blocks["split"] = split_in_use(blocks)
    return blocks


def before_run(pipeline: Pipeline, catalog: CatalogProtocol) -> dict[str, Any]:
    """Check what the nodes of a run need, before its first stage, and warn of what may go wrong.

    Returns the parameter blocks. Raises the errors with which a run ends before its first stage.
    """
    warnings = check_stores(pipeline, catalog)
    nodes = {node.name for node in pipeline.nodes}
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    launch, layers = blocks["launch"], catalog.load(CONF)
    refuse(block_faults(blocks, nodes))
    hardware = hardware_at_hand(launch)
    refuse(batch_faults(blocks, nodes, hardware.world), layers.origin)
    refuse(phase_faults(blocks, nodes))
    has_gold = all(source.name in GOLD_SCORES for source in blocks["split"].sources)
    refuse(faults_without_reward_model(blocks, nodes, has_gold=has_gold))
    warnings += adapter_rates(blocks, nodes, layers.chosen())
    warnings += slow_precisions(blocks, nodes) if hardware.has_bf16 else []
    free_port(launch.master_port)
    if launch.memory_check != "off":
        certain, possible = memory_faults(as_json(blocks), nodes, hardware)
        if launch.memory_check == "refuse":
            refuse(certain)
        warnings += certain + possible
    for warning in warnings:
        logger.warning("%s", warning)
    dry_run(blocks, nodes, Path(catalog.load("workspace")), hardware.world)
    return blocks


def before_node(
    node: str, inputs: Mapping[str, Any], nodes: Collection[str], blocks: Mapping[str, Any]
) -> None:
    """Check what a node of the run's `nodes` reads, before it runs.

    A model of the hub is first seen here, and so are the true answers in a split and the accuracy
    of a reward model.
    """
    split, evaluate, trained = (blocks[name] for name in ("split", "evaluate", "reward_model"))
    policies = {policy.stage: policy for policy in prompt_policies(blocks)}
    for name in {"base_model", "sft_model"} & inputs.keys():
        limit = positions(saved_config(inputs[name]))
        refuse(length_faults(limit, split, [*policies.values()], evaluate))
    if "split" in inputs:
        refuse(critic_faults(inputs["split"], blocks, nodes))
        check_split(inputs["split"], nodes, blocks)
        named = {*nodes, *(name.removeprefix("params:") for name in inputs)}
        asked = policy_stages().keys() & named or {"ppo"}
        rewards = [one for name in policies if name in asked for one in policies[name].rewards]
        judges = as_judges(rewards) if evaluate.rewards_judge(trained) else evaluate.judges
        is_trained = "params:evaluate" in inputs  # nothing reads the rewards any more
        require_true_answers(inputs["split"], [] if is_trained else rewards, judges)
    if trained is not None and "reward_model" in inputs:
        metrics = Manifest.read(inputs["reward_model"]).metrics
        if metrics and "validation/accuracy_over_length" not in metrics:
            raise ConfigError(
                "reward_model: found one of an earlier version, whose report lacks what the "
                "verdict needs, expected one of this version. Fix: run the whole pipeline"
            )
        if node in policies:
            check_gate(inputs["reward_model"], trained.gate, policies[node])


def check_root(root: str) -> None:
    """Raise ConfigError if the folder for all results has a name that others misread, or if no
    file can be written there."""
    found = [character for character in root if character in "*?[]{}:"]
    if found:
        raise ConfigError(
            f"root: found {found[0]!r} in {root!r}, which Kedro or PYTHONPATH reads as part of a "
            "pattern or a list. Fix: use a local folder without any of * ? [ ] { } :"
        )
    whole = Path(root).absolute()
    folder = next(path for path in (whole, *whole.parents) if path.exists())
    kind = "a folder that you cannot write to" if folder.is_dir() else "a file"
    try:
        TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # `kedro rlhf clean` makes room
            return
        raise ConfigError(
            f"root: found {root!r}, but {folder} is {kind} ({error.strerror}). Fix: set another "
            "folder with --params=root=FOLDER, or root in conf/local/globals.yml"
        ) from None


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


def check_stores(pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
    """Write to the store, and warn of versions after now. Raises StageError if the store fails."""
    entries = [catalog.get(name) for name in sorted(pipeline.all_outputs())]
    published = [entry for entry in entries if isinstance(entry, PathDataset)]
    if (store := catalog.load("store")) is not None:
        store.check()
    return [*filter(None, (entry.clock_fault() for entry in published))]


def check_split(split: Path, nodes: Collection[str], blocks: Mapping[str, Any]) -> None:
    """Raise DataError if a split has too few rows for one of the nodes, ConfigError if it holds
    nothing back for a second reward model."""
    if blocks["split"].held_back and not (split / JUDGE_MODEL).is_dir():
        raise ConfigError(
            f"{CAREFUL}.held_back: found a split that holds nothing back, expected one that "
            f"does. Fix: run the whole pipeline, or set {CAREFUL}.path instead"
        )
    report = json.loads((split / "report.json").read_text())
    rows = {path: file["rows"] for path, file in report.get("files", {}).items()}
    for phase, stages in trainers_of_phase(blocks).items():
        for stage in [one for one in stages if one in nodes and blocks.get(one)]:
            folders = (phase, "kto") if stage == "kto" else (phase,)
            if not any(rows.get(f"{folder}/train.arrow", 1) for folder in folders):
                raise DataError(
                    f"split: {stage} needs rows with {NEEDS[phase]}; found none in "
                    f"{', '.join(report['sources'])}. Fix: name such columns in `columns` of the "
                    f"source, add a source of such rows, give phase {phase} a weight in "
                    "split.weights, or choose another pipeline"
                )
    fewest = {
        "evaluation/test.arrow": (2, "raise split.test_fraction"),
        f"{JUDGE_MODEL}/train.arrow": (FEWEST, f"raise {CAREFUL}.held_back"),
    }
    for path, (least, fix) in fewest.items():
        if "evaluate" in blocks_of(nodes) and rows.get(path, least) < least:
            raise DataError(
                f"split: found {rows[path]} rows in {path}, expected at least {least}. Fix: {fix}, "
                "or add data"
            )


def check_gate(reward_model: Path, gate: float | None, policy: PPOConfig | SampledConfig) -> None:
    """Raise StageError if a policy would train on a reward model that is not better than the gate
    on held-out comparisons."""
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
