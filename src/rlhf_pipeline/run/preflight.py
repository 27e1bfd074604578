"""Checks of what the chosen nodes need, before a run and before each node."""

import errno
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from rlhf_pipeline.config.base_model import BaseModelConfig, positions, saved_config
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import JUDGE_MODEL, TrainedReward, as_judges
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import NEEDS, PHASES
from rlhf_pipeline.config.stages import (
    BLOCKS,
    ON_PROMPTS,
    adapter_rates,
    faults_without_reward_model,
    readers,
    samplers,
)
from rlhf_pipeline.data.sources.registry import FirstRows, first_rows
from rlhf_pipeline.data.sources.synthetic import GOLD_SCORES
from rlhf_pipeline.data.split_report import require_true_answers
from rlhf_pipeline.datasets.artifact import PathDataset
from rlhf_pipeline.errors import ConfigError, DataError, StageError
from rlhf_pipeline.pipelines.table import parameter_blocks, pipeline_of, policy_stages
from rlhf_pipeline.run.checks import batch_faults, length_faults, refuse
from rlhf_pipeline.run.dry_run import (
    door_faults,
    function_faults,
    model_faults,
    reference_faults,
    stage_faults,
    task_faults,
)
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.sizing.fit import automatic, find_fit, micro_batch_tokens, size_text
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import base_model_shape
from rlhf_pipeline.stages.launch.resources import free_port, hardware_at_hand

logger = logging.getLogger(__name__)

EXAMPLES = {"grpo": "{rewards: [{reference: last_number}]}", "distill": "{teacher: FOLDER}"}
"""The smallest block of a policy, if not an empty one is enough."""

CAREFUL, FEWEST = "evaluate.judge_model", 20
"""The place of a second reward model, and the fewest comparisons that it must have."""

CONF = "params:conf"
"""The entry of the catalog with the loader of the configuration, which knows who set what."""


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


def check_pipeline(pipeline: Pipeline, catalog: CatalogProtocol) -> None:
    """Check what the nodes of a run need: stores, rows for each phase, a free port, memory,
    functions that can be called, tokenizers.

    Raises the errors with which a run ends before its first stage.
    """
    warnings = check_stores(pipeline, catalog)
    nodes = {node.name for node in pipeline.nodes}
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    launch, layers = blocks["launch"], catalog.load(CONF)
    check_blocks(blocks, nodes)
    hardware = hardware_at_hand(launch)
    refuse(batch_faults(blocks, nodes, hardware.world), layers.origin)
    check_phases(blocks, nodes)
    has_gold = all(source.name in GOLD_SCORES for source in blocks["split"].sources)
    refuse(faults_without_reward_model(blocks, nodes, has_gold=has_gold))
    warnings += adapter_rates(blocks, nodes, layers.chosen())
    free_port(launch.master_port)
    if launch.memory_check != "off":
        refuses = launch.memory_check == "refuse"
        warnings += check_memory(as_json(blocks), nodes, hardware, refuses=refuses)
    for warning in warnings:
        logger.warning("%s", warning)
    dry_run(blocks, nodes, Path(catalog.load("workspace")), hardware.world)


def dry_run(blocks: Mapping[str, Any], nodes: Collection[str], workspace: Path, ranks: int) -> None:
    """Look at the first rows, call each function of the nodes once, and look at tokenizers.

    Raises DataError for files, and ConfigError with one line for each other fault.
    """
    split, is_judged = blocks["split"], any(node.startswith("evaluate") for node in nodes)
    sources = split.records() if "split" in nodes else []
    texts = split.pretraining.records() if sources and split.pretraining else []
    given = {f"split.sources.{index}": each for index, each in enumerate(sources)}
    given |= {f"split.pretraining.sources.{index}": each for index, each in enumerate(texts)}
    judge = blocks["evaluate"].judge_model if is_judged else None
    if judge is not None and judge.path is not None:
        given[CAREFUL] = judge.source.records()
    found = dict[str, FirstRows]()
    for place, source in given.items():
        try:
            found[place] = first_rows(source, split.max_bad_fraction)
        except DataError as error:
            raise DataError(f"{place}: {error.message}") from None
    rows = [(split.sources[n], found[f"split.sources.{n}"]) for n in range(len(sources))]
    for_ppo = [(source, each) for source, each in rows if source.may_serve("ppo")]
    rewards = {
        f"{policy.sampler}.rewards.{index}": reward
        for policy in samplers(blocks)
        if policy.stage in nodes
        for index, reward in enumerate(policy.rewards)
    }
    named = enumerate(blocks["evaluate"].judges if is_judged else ())
    judges = {f"evaluate.judges.{index}": judge for index, judge in named}
    faults = [*stage_faults(blocks, nodes, rows), *reference_faults(rewards, for_ppo)]
    careful = careful_faults(found[CAREFUL], ranks) if CAREFUL in found else ()
    refuse([*faults, *reference_faults(judges, rows), *careful])
    inner = {p.sampler: p.sample for p in samplers(blocks) if isinstance(p, SampledConfig)}
    faults = [*door_faults({**blocks, **inner}, workspace)]
    every = dict(enumerate(split.sources))
    judge_too = blocks["reward_model"] is None and not blocks["evaluate"].judges
    rated = {index: one for index, one in every.items() if judge_too or one.may_serve("ppo")}
    faults += [*function_faults(rewards, for_ppo, rated, blocks, workspace)]
    faults += [*function_faults(judges, rows, every, blocks, workspace)]
    tasks = blocks["evaluate"].tasks if is_judged else None
    faults += [] if tasks is None else task_faults(tasks, workspace)
    refuse([*faults, *model_faults(blocks, nodes, rows, workspace)])


def careful_faults(rows: FirstRows, ranks: int) -> Iterator[str]:
    """Comparisons for a second reward model that are too few, or no comparisons."""
    prompts, fewest = len({row.prompt for row in rows.values()}), max(FEWEST, 5 * ranks)
    if any(row.rejected is None for row in rows.values()):
        yield (
            f"{CAREFUL}.path: found one answer in a row, expected chosen and rejected in each. "
            f"Fix: name them in {CAREFUL}.columns"
        )
    elif rows.is_whole and prompts < fewest:
        yield (
            f"{CAREFUL}.path: found comparisons of {prompts} prompts, expected at least "
            f"{fewest}, for five models in turn are measured on a fifth by all {ranks} ranks. "
            f"Fix: add comparisons, or set {CAREFUL}.held_back instead"
        )


def check_stores(pipeline: Pipeline, catalog: CatalogProtocol) -> list[str]:
    """Write to the store, and warn of versions after now. Raises StageError if the store fails."""
    entries = [catalog.get(name) for name in sorted(pipeline.all_outputs())]
    published = [entry for entry in entries if isinstance(entry, PathDataset)]
    if (store := catalog.load("store")) is not None:
        store.check()
    return [*filter(None, (entry.clock_fault() for entry in published))]


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
        limit = positions(saved_config(inputs[name]))
        refuse(length_faults(limit, split, [*policies.values()], evaluate))
    if "split" in inputs:
        if split.held_back and not (inputs["split"] / JUDGE_MODEL).is_dir():
            raise ConfigError(
                f"{CAREFUL}.held_back: found a split that holds nothing back, expected one that "
                f"does. Fix: run the whole pipeline, or set {CAREFUL}.path instead"
            )
        check_rows(inputs["split"], [one for one in nodes if blocks.get(one)], blocks)
        if any(one.startswith("evaluate") for one in nodes):
            check_judging_rows(inputs["split"])
        named = {*nodes, *(name.removeprefix("params:") for name in inputs)}
        asked = policy_stages().keys() & named or {"ppo"}
        rewards = [one for name in policies if name in asked for one in policies[name].rewards]
        judges = evaluate.judges if trained or evaluate.judges else as_judges(rewards)
        if "params:evaluate" in inputs:
            rewards = []
        require_true_answers(inputs["split"], rewards, judges)
    if trained is not None and "reward_model" in inputs:
        metrics = Manifest.read(inputs["reward_model"]).metrics
        if metrics and "validation/accuracy_over_length" not in metrics:
            raise ConfigError(
                "reward_model: found one of an earlier version, whose report lacks what the "
                "verdict needs, expected one of this version. Fix: run the whole pipeline"
            )
        if node in policies:
            check_gate(inputs["reward_model"], trained.gate, policies[node])


def check_rows(split: Path, nodes: Collection[str], blocks: Mapping[str, Any]) -> None:
    """Raise DataError if a split has no row for one of the nodes that train."""
    report = json.loads((split / "report.json").read_text())
    files = {path: file["rows"] for path, file in report.get("files", {}).items()}
    for phase, stages in readers(blocks).items():
        for stage in [one for one in stages if one in nodes]:
            folders = (phase, "kto") if stage == "kto" else (phase,)
            if not any(files.get(f"{folder}/train.arrow", 1) for folder in folders):
                raise DataError(
                    f"split: {stage} needs rows with {NEEDS[phase]}; found none in "
                    f"{', '.join(report['sources'])}. Fix: name such columns in `columns` of the "
                    f"source, add a source of such rows, give phase {phase} a weight in "
                    "split.weights, or choose another pipeline"
                )


def check_judging_rows(split: Path) -> None:
    """Raise DataError if a split has too few rows for an interval, or for a second reward model."""
    files = json.loads((split / "report.json").read_text()).get("files", {})
    fewest = {
        "evaluation/test.arrow": (2, "raise split.test_fraction"),
        f"{JUDGE_MODEL}/train.arrow": (FEWEST, f"raise {CAREFUL}.held_back"),
    }
    for path, (least, fix) in fewest.items():
        if path in files and (rows := files[path]["rows"]) < least:
            raise DataError(
                f"split: found {rows} rows in {path}, expected at least {least}. Fix: {fix}, or "
                "add data"
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
            f"{name}: found null, expected the parameters of the node {name}. Fix: write `{name}: "
            f"{EXAMPLES.get(name, '{}')}` into conf/local/parameters.yml, or choose another "
            f"pipeline: {' or '.join(others)}"
        )


def check_phases(blocks: Mapping[str, Any], nodes: Collection[str]) -> None:
    """Raise ConfigError if the nodes train a phase for which their split has no prompts."""
    weights = blocks["split"].weights
    trained = {node for node in nodes if blocks.get(node) is not None}
    empty = [
        phase
        for phase, weight in zip(PHASES, weights, strict=True)
        if weight == 0 and trained & {*readers(blocks)[phase]} and "split" in nodes
    ]
    if empty:
        raise ConfigError(
            f"split.weights: found {list(weights)}, with 0 for {', '.join(empty)}, expected "
            "more than 0 for each stage of the pipeline that trains. Fix: raise it, or choose a "
            "pipeline without this stage. Comparisons go to dpo and kto if reward_model is set, "
            f"or if {', '.join(ON_PROMPTS)} are null"
        )
