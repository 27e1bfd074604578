"""Checks that take more than one block of parameters: what a run would stumble over later, said before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from rlhf_pipeline.config.architecture import suggestion
from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.block import leaves as _leaves
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.reward_files import reward_faults
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.data.sources.lookup import find_source
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.stage_registry import parameter_blocks, stage_specs
from rlhf_pipeline.stages.cache.forcing import forced_stages


def check_root(root: str) -> None:
    """Refuse a folder for all artifacts whose name Kedro, or Python's module path, would take for something else."""
    found = [character for character in root if character in "*?[]{}:"]
    if found:
        raise ConfigError(
            f"root: {root!r} has the character {found[0]!r}, which Kedro or PYTHONPATH reads as part of a pattern or a list; "
            "name a local folder without any of * ? [ ] { } :"
        )


def preflight(parameters: Mapping[str, Any], *, processes: int, gpus: int) -> None:
    """Check all parameters of a run together.

    Args:
        parameters: top-level names to values, as the YAML files and `--params` give them or as Kedro has typed them.
        processes: ranks that training will have.
        gpus: GPUs of this machine.

    Raises:
        ConfigError: with every fault found, a line each.
    """
    parameters = {
        name: value.model_dump(mode="json") if isinstance(value, Block) else value
        for name, value in parameters.items()
    }
    faults = [*_unknown(parameters), *_invalid(parameters)]
    if not faults:
        faults = [
            *_indivisible(parameters, processes),
            *_half_precision(parameters, gpus),
            *_quantized(parameters, gpus),
            *_misplaced_sources(parameters),
            *_too_long(parameters),
            *_ptx_faults(parameters),
            *reward_faults(PPOConfig.model_validate(parameters["ppo"]).rewards),
        ]
    if faults:
        raise ConfigError(
            "\n".join(["the parameters cannot work:", *(f"  - {fault}" for fault in faults)])
        )


def _unknown(parameters: Mapping[str, Any]) -> list[str]:
    known = [*parameter_blocks(), "seed", "force"]
    extra = [name for name in parameters if name not in known and name not in ("root",)]
    return [
        f"{name}: no such parameter{suggestion(name, known)}; known are {', '.join(known)}"
        for name in extra
    ]


def _invalid(parameters: Mapping[str, Any]) -> list[str]:
    faults = []
    for name, block in parameter_blocks().items():
        try:
            block.model_validate(parameters.get(name, {}))
        except ValidationError as error:
            faults += [_fault(name, detail) for detail in error.errors()]
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        faults.append(f"seed: must be a whole number from 0 on, is {seed!r}")
    try:
        forced_stages(parameters.get("force"), stage_specs())
    except ConfigError as error:
        faults.append(str(error))
    return faults


def _fault(block: str, detail: Any) -> str:
    place = ".".join([block, *(str(part) for part in detail["loc"])])
    misplaced = detail["type"] == "extra_forbidden" and isinstance(
        detail["input"], str
    )  # it may be a token
    shown = not misplaced and not isinstance(detail["input"], dict)
    given = f", is {without_secrets(repr(detail['input']))}" if shown else ""
    return f"{place}: {detail['msg'].removeprefix('Value error, ')}{given}"


def _indivisible(parameters: Mapping[str, Any], processes: int) -> list[str]:
    faults = []
    blocks = {
        name: block.model_validate(parameters.get(name, {}))
        for name, block in parameter_blocks().items()
    }
    given = dict(_leaves({name: block.model_dump(mode="json") for name, block in blocks.items()}))
    for place in [place for spec in stage_specs().values() for place in spec.batch_sizes]:
        size = given.get(place, 0)  # 0: its block is off
        if size % processes:
            faults.append(
                f"{place}: {size} rows cannot be shared evenly by {processes} ranks (launch.processes); "
                f"use {size - size % processes or processes} or {size - size % processes + processes}"
            )
    return faults or _split_groups(PPOConfig.model_validate(parameters["ppo"]), processes)


def _split_groups(ppo: PPOConfig, processes: int) -> list[str]:
    """All responses to a prompt are one rank's: it compares them."""
    unit = processes * ppo.responses_per_prompt
    if not ppo.rollout_batch_size % unit:
        return []
    return [
        f"ppo.rollout_batch_size: {ppo.rollout_batch_size} responses, {ppo.responses_per_prompt} to a prompt "
        f"(ppo.responses_per_prompt), answer {ppo.rollout_batch_size // ppo.responses_per_prompt} prompts, which cannot be "
        f"shared evenly by {processes} ranks (launch.processes); use a multiple of {unit}"
    ]


def _half_precision(parameters: Mapping[str, Any], gpus: int) -> list[str]:
    return [
        f"{place}: fp16 needs a GPU, and there is none here; use bf16 or fp32"
        for place, value in _leaves(parameters)
        if place.endswith(".precision") and value == "fp16" and gpus == 0
    ]


def _quantized(parameters: Mapping[str, Any], gpus: int) -> list[str]:
    places = [
        place
        for place, value in _leaves(parameters)
        if place.endswith(".lora.quantize") and value is not None
    ]
    if gpus == 0:
        return [
            f"{place}: 4-bit weights need a GPU, and there is none here; set it to null"
            for place in places
        ]
    if find_spec("bitsandbytes") is None:
        install = ".venv/bin/pip install --constraint constraints.txt --editable '.[quantization]'"
        return [
            f"{place}: 4-bit weights need bitsandbytes, which is not installed; run {install}"
            for place in places
        ]
    return []


def _misplaced_sources(parameters: Mapping[str, Any]) -> list[str]:
    split = SplitConfig.model_validate(parameters["split"])
    pretraining = split.pretraining.records() if split.pretraining is not None else []
    return [
        *_source_faults("split.sources", split.records(), wants_text=False),
        *_source_faults("split.pretraining.sources", pretraining, wants_text=True),
    ]


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
                f"{place}.{index}: {source.name!r} holds examples, not plain text; list it in split.sources"
            )
        if has_text and not wants_text:
            faults.append(
                f"{place}.{index}: {source.name!r} holds plain text; list it in split.pretraining.sources"
            )
        if known.local_only and source.path is None:
            faults.append(f"{place}.{index}.path: {source.name!r} reads files; name one")
    return faults


def _too_long(parameters: Mapping[str, Any]) -> list[str]:
    split = SplitConfig.model_validate(parameters["split"])
    positions = BaseModelConfig.model_validate(parameters["base_model"]).positions
    if positions is None:
        return []
    responses = {"split.max_response_tokens": split.max_response_tokens}
    for name, sampling in {
        "ppo": PPOConfig.model_validate(parameters["ppo"]).sampling,
        "evaluate": EvaluateConfig.model_validate(parameters["evaluate"]).sampling,
    }.items():
        responses[f"{name}.sampling.max_response_tokens"] = sampling.max_response_tokens
    return [
        f"{place}: {response} after a prompt of split.max_prompt_tokens {split.max_prompt_tokens} exceed the model's "
        f"{positions} positions (max_position_embeddings in base_model.architecture); lower one or raise the other"
        for place, response in responses.items()
        if split.max_prompt_tokens + response > positions
    ]


def _ptx_faults(parameters: Mapping[str, Any]) -> list[str]:
    """What PPO's language-model loss misses in the text that the split packs."""
    text = SplitConfig.model_validate(parameters["split"]).pretraining
    positions = BaseModelConfig.model_validate(parameters["base_model"]).positions
    if PPOConfig.model_validate(parameters["ppo"]).ptx is None:
        return []
    if text is None:
        return [
            "ppo.ptx: its loss is on the text of split.pretraining, which is not set; give split.pretraining sources and "
            "block_tokens, or set ppo.ptx to null"
        ]
    if positions is not None and text.block_tokens > positions:
        return [
            f"split.pretraining.block_tokens: {text.block_tokens} exceed the model's {positions} positions "
            "(max_position_embeddings in base_model.architecture), and ppo.ptx reads whole blocks; lower one or raise the other"
        ]
    return []
