"""Checks of all parameters together, before a run starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.architecture import positions_in
from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.reward_files import reward_faults
from rlhf_pipeline.config.split import PHASES, SourceConfig, SplitConfig
from rlhf_pipeline.config.validation import faults as block_faults
from rlhf_pipeline.data.sources.lookup import find_source
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stage_registry import parameter_blocks, stage_specs
from rlhf_pipeline.stages.context import forced_stages
from rlhf_pipeline.stages.launch.resources import process_count

LAYERS = ("base", "embedded", "local")
"""Folders of conf/ that are no environments: each is read by itself."""


def check_environment(conf: Path, name: str | None) -> None:
    """Check the name of the environment, the option `--env`.

    Raises:
        ConfigError: the configuration has no such folder.
    """
    if name is not None and conf.is_dir() and not (conf / name).is_dir():
        known = sorted(
            path.name for path in conf.iterdir() if path.is_dir() and path.name not in LAYERS
        )
        raise ConfigError(
            f"--env: found {name!r}{suggestion(name, known)}; the environments, which are folders "
            f"of {conf.name}/, are {', '.join(known)}"
        )


def check_root(root: str) -> None:
    """Check the name of the folder for all artifacts.

    Raises:
        ConfigError: Kedro or PYTHONPATH would read the name as a pattern or a list, or nothing can
            be written there.
    """
    found = [character for character in root if character in "*?[]{}:"]
    if found:
        raise ConfigError(
            f"root: found {found[0]!r} in {root!r}, which Kedro or PYTHONPATH reads as part of a "
            "pattern or a list. Fix: use a local folder without any of * ? [ ] { } :"
        )
    folder = next(
        path for path in (Path(root).absolute(), *Path(root).absolute().parents) if path.exists()
    )
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        kind = "a folder that you cannot write to" if folder.is_dir() else "a file"
        raise ConfigError(
            f"root: found {root!r}, but {folder} is {kind}. Fix: set another folder with "
            "--params=root=FOLDER, or root in conf/local/globals.yml"
        )


def preflight(
    parameters: Mapping[str, Any],
    *,
    gpus: int,
    origin: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Check all parameters of a run together.

    Args:
        parameters: the blocks as plain values, by name.
        gpus: number of GPUs of this machine.
        origin: the file that sets a parameter; None: no file.

    Raises:
        ConfigError: the message has one line for each fault.
    """
    faults = [*_unknown_names(parameters), *_invalid_values(parameters)]
    if not faults:
        blocks = {
            name: block.model_validate(parameters.get(name, {}))
            for name, block in parameter_blocks().items()
        }
        values = dict(leaves(as_json(blocks)))
        processes = process_count(LaunchConfig.model_validate(parameters["launch"]), gpus)
        base_model = BaseModelConfig.model_validate(parameters["base_model"])
        split = SplitConfig.model_validate(parameters["split"])
        ppo = PPOConfig.model_validate(parameters["ppo"])
        evaluate = EvaluateConfig.model_validate(parameters["evaluate"])
        faults = [
            *(_batch_size_faults(values, processes) or _group_faults(ppo, processes)),
            *_process_faults(processes, gpus),
            *_fp16_faults(values, gpus),
            *_quantization_faults(values, gpus),
            *_source_faults("split.sources", split.records(), wants_text=False),
            *_path_faults(base_model.path),
            *_ptx_faults(split, ppo),
            *_length_faults(base_model.positions, split, ppo, evaluate),
            *reward_faults(ppo.rewards),
            *reward_faults(evaluate.judges, "evaluate.judges"),
        ]
        if split.pretraining is not None:
            texts = split.pretraining.records()
            faults += _source_faults("split.pretraining.sources", texts, wants_text=True)
    _refuse([_with_origin(fault, origin) for fault in faults])


def check_lengths(
    model: Path, split: SplitConfig, ppo: PPOConfig, evaluate: EvaluateConfig
) -> None:
    """Check the limits of prompts, responses and texts against the positions of a model.

    `preflight` does this for models that are built or in a local folder. A model on the hub is
    known once stage base_model has fetched it to the folder `model`.

    Raises:
        ConfigError: the message has one line for each fault.
    """
    _refuse(_length_faults(positions_in(model), split, ppo, evaluate))


def _refuse(faults: Sequence[str]) -> None:
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        raise ConfigError("\n".join(["invalid parameters:", *(f"  - {one}" for one in faults)]))


def check_phases(weights: Sequence[float], nodes: Collection[str]) -> None:
    """Check that the split has prompts for every phase that the chosen nodes train.

    Args:
        weights: `split.weights`, in the order of `PHASES`.
        nodes: names of the nodes of the run.

    Raises:
        ConfigError: a phase has weight 0 although the run splits the data for it.
    """
    empty = [
        phase
        for phase, weight in zip(PHASES, weights, strict=True)
        if weight == 0 and {"split", phase} <= set(nodes)
    ]
    if empty:
        raise ConfigError(
            f"split.weights: found {list(weights)}, with 0 for {', '.join(empty)}, expected more "
            "than 0 for each stage of the pipeline that trains. Fix: raise it, or choose a "
            "pipeline without this stage"
        )


def _with_origin(fault: str, origin: Callable[[str], str | None]) -> str:
    """Name the file that sets the parameter of a fault `parameter: ...`."""
    place, colon, rest = fault.partition(":")
    file = origin(place)
    return fault if file is None else f"{place} ({file}){colon}{rest}"


def _unknown_names(parameters: Mapping[str, Any]) -> list[str]:
    known = [*parameter_blocks(), "seed", "force", "inputs"]
    return [
        f"{name}: unknown parameter{suggestion(name, known)}; the parameters are {', '.join(known)}"
        for name in parameters
        if name not in known and name != "root"
    ]


def _invalid_values(parameters: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    for name, block in parameter_blocks().items():
        faults += block_faults(name, block, parameters.get(name, {}))
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        faults.append(f"seed: found {seed!r}, expected a whole number >= 0")
    if parameters.get("inputs") not in (None, "newest"):
        faults.append(f"inputs: found {parameters['inputs']!r}, expected newest or null")
    try:
        forced_stages(parameters.get("force"), stage_specs())
    except ConfigError as error:
        faults.append(str(error))
    return faults


def _batch_size_faults(values: Mapping[str, Any], processes: int) -> list[str]:
    faults = []
    for place in [place for spec in stage_specs().values() for place in spec.batch_sizes]:
        size = values.get(place, 0)  # 0: the block is null
        if size % processes:
            lower = size - size % processes
            fix = f"{lower} or {lower + processes}" if lower else str(processes)
            faults.append(
                f"{place}: found {size}, expected a multiple of {processes} ranks "
                f"(launch.processes). Fix: use {fix}"
            )
    return faults


def _group_faults(ppo: PPOConfig, processes: int) -> list[str]:
    """One rank generates all responses to a prompt, because it compares them."""
    unit = processes * ppo.responses_per_prompt
    if not ppo.rollout_batch_size % unit:
        return []
    return [
        f"ppo.rollout_batch_size: found {ppo.rollout_batch_size}, expected a multiple of {unit}: "
        f"{processes} ranks (launch.processes) times {ppo.responses_per_prompt} responses "
        "(ppo.responses_per_prompt)"
    ]


def _process_faults(processes: int, gpus: int) -> list[str]:
    if gpus == 0 or processes <= gpus:
        return []
    return [
        f"launch.processes: found {processes}, expected at most {gpus}, one for each GPU. Fix: set "
        "it to null for all GPUs, or train on the CPU with CUDA_VISIBLE_DEVICES="
    ]


def _fp16_faults(values: Mapping[str, Any], gpus: int) -> list[str]:
    return [
        f"{place}: found fp16, which needs a GPU; this machine has none. Fix: use bf16 or fp32"
        for place, value in values.items()
        if place.endswith(".precision") and value == "fp16" and gpus == 0
    ]


def _quantization_faults(values: Mapping[str, Any], gpus: int) -> list[str]:
    places = [
        place
        for place, value in values.items()
        if place.endswith(".lora.quantize") and value is not None
    ]
    if gpus == 0:
        return [
            f"{place}: found 4-bit weights, which need a GPU; this machine has none. Fix: set it "
            "to null"
            for place in places
        ]
    if find_spec("bitsandbytes") is None:
        install = ".venv/bin/pip install --constraint constraints.txt --editable '.[quantization]'"
        return [
            f"{place}: 4-bit weights need bitsandbytes, which is not installed. Fix: {install}"
            for place in places
        ]
    return []


def _source_faults(place: str, sources: Sequence[SourceConfig], *, wants_text: bool) -> list[str]:
    faults = []
    for index, source in enumerate(sources):
        try:
            known = find_source(source.name)
        except ConfigError as error:
            faults.append(f"{place}.{index}.name: {error}")
            continue
        has_text = known.kind == "text" or (
            source.columns is not None and source.columns.text is not None
        )
        if wants_text and not has_text:
            faults.append(
                f"{place}.{index}: {source.name!r} contains examples, expected plain text. Fix: "
                "list it in split.sources"
            )
        if has_text and not wants_text:
            faults.append(
                f"{place}.{index}: {source.name!r} contains plain text, expected examples. Fix: "
                "list it in split.pretraining.sources"
            )
        if known.local_only and source.path is None:
            faults.append(f"{place}.{index}.path: found null, expected a file for {source.name!r}")
    return faults


def _path_faults(path: str | None) -> list[str]:
    """Faults of a local base model; a name such as `facebook/opt-350m` is on the hub."""
    if path is None:
        return []
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        return [
            f"base_model.path: found {path!r}, a folder without config.json, expected a model "
            "saved by `save_pretrained`. Fix: set the folder that contains config.json"
        ]
    if not folder.is_dir() and (path.startswith((".", "/")) or path.count("/") > 1):
        return [
            f"base_model.path: found no folder {path!r}. Fix: check the spelling; models on the "
            "hub have names like facebook/opt-350m"
        ]
    return []


def _length_faults(
    positions: int | None, split: SplitConfig, ppo: PPOConfig, evaluate: EvaluateConfig
) -> list[str]:
    """Faults of the limits, given the model's positions (None: unlimited, or not known yet)."""
    if positions is None:
        return []
    model = f"the model's {positions} positions (max_position_embeddings)"
    responses = {
        "split.max_response_tokens": split.max_response_tokens,
        "ppo.sampling.max_response_tokens": ppo.sampling.max_response_tokens,
        "evaluate.sampling.max_response_tokens": evaluate.sampling.max_response_tokens,
    }
    prompt = split.max_prompt_tokens
    faults = [
        f"{place}: found {response}, expected at most {positions - prompt}: {model} less "
        f"split.max_prompt_tokens {prompt}"
        for place, response in responses.items()
        if prompt + response > positions > prompt
    ]
    if prompt >= positions:
        faults.append(f"split.max_prompt_tokens: found {prompt}, expected fewer than {model}")
    text = split.pretraining
    if ppo.ptx is not None and text is not None and text.block_tokens > positions:
        faults.append(
            f"split.pretraining.block_tokens: found {text.block_tokens}, expected at most {model}: "
            "ppo.ptx reads whole blocks"
        )
    return faults


def _ptx_faults(split: SplitConfig, ppo: PPOConfig) -> list[str]:
    """Faults of the plain text that PPO's language-model loss needs."""
    if ppo.ptx is None or split.pretraining is not None:
        return []
    return [
        "ppo.ptx: split.pretraining, the text for its loss, is null. Fix: set the sources and "
        "block_tokens of split.pretraining, or set ppo.ptx to null"
    ]
