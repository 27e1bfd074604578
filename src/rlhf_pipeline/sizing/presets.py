"""Presets: published hyper-parameters (recipes.yml) and memory settings, as an environment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, lcm
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml
from jinja2 import StrictUndefined, Template

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.stages import BLOCKS, StageConfig
from rlhf_pipeline.config.training import FrozenModel, TrainedModel
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.fit import Changes, changed, fits
from rlhf_pipeline.sizing.hardware import GIB, Hardware, named
from rlhf_pipeline.sizing.models import INSTRUCT, Shape, find_model
from rlhf_pipeline.sizing.stages import StageMemory, plan_stage

RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yml").read_text(encoding="utf-8"))
SOURCES: Mapping[str, str] = RECIPES["sources"]
"""The publications."""
LORA_FACTOR = 10
"""Learning rate of adapters, relative to that of whole models."""
RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"
Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
Road = Literal["full", "dpo", "kto", "grpo"]
ROADS: Mapping[Road, Sequence[str]] = RECIPES["roads"]
"""The stages of the pipelines that have presets."""
HARDWARE: Sequence[str] = RECIPES["hardware"]
TRAINED = ("sft", "reward_model", "ppo.actor", "ppo.critic", "dpo", "kto", "grpo.actor")

TOKENS = ((8192, 4096, 2048), (1024,))
"""Tokens of a micro batch to try; the last ones leave a GPU idle, so all else is tried before."""
ROWS = (256, 128, 64, 32, 16, 8)
"""Responses at a time to try, on each rank."""
GENERATORS = ("vllm", "transformers")
"""What samples, the faster one first. Adapters of 4-bit models are not for vLLM."""
LIGER = ("llama", "mistral", "qwen2", "qwen3")
"""Families that Liger has fused kernels for."""


class Value(NamedTuple):
    """A value of a parameter, and its source."""

    value: Any
    source: str = ""


@dataclass(frozen=True)
class Preset:
    """Parameters, and the memory that they need."""

    model: str
    gpus: str
    method: Method
    road: Road
    instruct: bool
    """Whether it starts from the chat model, which SFT does not train again."""
    reward: str | None
    """The model that the reward model starts from, if that is not the policy's."""
    settings: Mapping[str, Value]
    """Values by dotted name, with the source or reason of each."""
    memory: dict[str, StageMemory]

    @property
    def name(self) -> str:
        start = f"{self.model}-instruct" if self.instruct else self.model
        kinds = (kind for kind in (self.method, self.road) if kind != "full")
        own = () if self.reward is None else (self.reward,)
        return "-".join((start, *own, self.gpus, *kinds))

    @property
    def hardware(self) -> Hardware:
        return named(None, self.gpus)

    @property
    def parameters(self) -> dict[str, Any]:
        return changed({}, {name: value for name, (value, _) in self.settings.items()})


def make_preset(model: str, gpus: str, method: Method, road: Road = "full", **start: Any) -> Preset:
    """The preset of a model by its short name on hardware such as 2x8x80; raises ConfigError if the
    model is unknown or does not fit, with what fits. `start` is as in `find_preset`."""

    def found(size: str, how: Method) -> Preset | None:
        return find_preset(model, size, how, road, **start)

    if (preset := found(gpus, method)) is not None:
        return preset
    fixes = [f"--gpus {size}" for size in HARDWARE if found(size, method) is not None][:1]
    fixes += [f"--method {each}" for each in METHODS if found(gpus, each) is not None]
    raise ConfigError(
        f"--gpus: found {gpus}, expected more memory for {model} with --method {method}. Fix: use "
        f"{', or '.join(fixes) or 'a smaller model'}"
    )


def find_preset(
    model: str,
    gpus: str,
    method: Method,
    road: Road = "full",
    *,
    instruct: bool = False,
    reward: str | None = None,
) -> Preset | None:
    """The preset; None if a stage does not fit. Raises ConfigError if a name is unknown."""
    hardware, published = named(None, gpus), find_model(model)
    if instruct and model not in INSTRUCT:
        raise ConfigError(
            f"--instruct: found {model}, expected a model with a chat model: {', '.join(INSTRUCT)}"
        )
    stages = [stage for stage in ROADS[road] if not (instruct and stage == "sft")]
    left_out = [stage for stage in ("sft", "reward_model", "ppo") if stage not in stages]
    settings = {"base_model.path": Value(INSTRUCT[model] if instruct else published.path)}
    settings |= _launch(hardware)
    settings |= dict.fromkeys(left_out, Value(None, "does not train"))
    recipe = hyperparameters(model, method, road)
    for name, value in _shared_evenly(recipe, hardware.world):
        # Beside those of the road, batches of other stages that the ranks could not share.
        block, is_changed = name.partition(".")[0], value != recipe[name]
        if block in (*stages, "split") or (is_changed and block not in left_out):
            settings[name] = value
    if method != "full":
        adapters = [f"{name}.lora" for name in TRAINED if name.partition(".")[0] in stages]
        settings |= dict.fromkeys(adapters, Value(*RECIPES["adapters"][method]))
    if reward is not None:
        own, families = find_model(reward), (_family(model), _family(reward))
        if "reward_model" not in stages:
            raise ConfigError(
                f"--reward-model: found {reward} with --pipeline {road}, which trains no reward "
                "model. Fix: remove one of them"
            )
        settings["reward_model.start"] = Value("own", "a reward model of its own size")
        settings["reward_model.base_model.path"] = Value(own.path)
        has_its_tokens = len({*families}) == 1 and own.shape.vocab == published.shape.vocab
        if "ppo" in stages and (instruct or not has_its_tokens):
            reason = "the reward model may have another tokenizer or template"
            settings["ppo.critic.start"] = Value("policy", reason)
    preset = Preset(model, gpus, method, road, instruct, reward, settings, {})
    parameters = preset.parameters
    for stage in stages:
        placed = place(stage, parameters, published.shape, hardware, method)
        if placed is None:
            return None
        settings |= {f"{stage}.{name}": Value(value) for name, value in placed[0].items()}
        preset.memory[stage] = placed[1]
    return preset


def hyperparameters(model: str, method: Method, road: Road = "full") -> dict[str, Value]:
    """Data, and the recipe of each stage; raises ConfigError if the model is unknown."""
    size = find_model(model).shape.parameters
    published = RECIPES["common"] | RECIPES["families"][_family(model)]
    if road == "full":
        published |= RECIPES["ppo_above_8b" if size > 8.5e9 else "ppo"]
    published |= RECIPES["above_30b"] if size > 29e9 else {}
    published |= RECIPES["above_60b"].get(_family(model), {}) if size > 60e9 else {}
    published |= RECIPES["grpo"] if road == "grpo" else {}
    values = {name: Value(*each) for name, each in published.items()}
    if method == "full":
        return values
    for name, (value, source) in values.items():
        if name.endswith(RATE):
            raised = float(f"{LORA_FACTOR * value:.6g}")
            values[name] = Value(raised, f"{LORA_FACTOR} x {source}: Biderman 2024")
    values[f"sft.{RATE}"] = Value(1e-4 if size > 15e9 else 2e-4, "Dettmers 2023")
    values[f"sft.{DECAY}"] = Value(0.0, "Dettmers 2023")
    return values


def _family(model: str) -> str:
    return next(name for name in RECIPES["families"] if model.startswith(name))


def _launch(hardware: Hardware) -> dict[str, Value]:
    ranks = {"launch.processes": Value(hardware.ranks, "ranks of each node, one for each GPU")}
    if hardware.nodes == 1:
        return ranks
    command = f"srun --nodes={hardware.nodes} --ntasks-per-node={hardware.ranks} {{command}}"
    return ranks | {
        "launch.mode": Value("command", "or hostfile: docs/cluster.md"),
        "launch.nodes": Value(hardware.nodes),
        "launch.command": Value(command, "SLURM starts the ranks of a stage"),
    }


def _shared_evenly(values: Mapping[str, Value], ranks: int) -> Iterator[tuple[str, Value]]:
    """Batch sizes that the ranks can share, at least as large as the published ones."""
    groups = values.get("grpo.responses_per_prompt", Value(1)).value
    unit = ranks
    for name, (value, source) in sorted(values.items(), key=lambda each: "rollout" in each[0]):
        if name.endswith("batch_size"):
            # The responses of a step are whole minibatches, and those of GRPO whole groups.
            unit = lcm(unit, groups) if name.startswith("grpo.") else unit
            size = unit * ceil(value / unit)
            source = source if size == value else f"for {ranks} ranks; {source} has {value}"
            value = size
        unit = value if name.endswith(".minibatch_size") else unit
        yield name, Value(value, source)


def place(
    stage: str, parameters: Mapping[str, Any], shape: Shape, hardware: Hardware, method: Method
) -> tuple[Changes, StageMemory] | None:
    """The first settings that fit, in the order of their costs, with their memory; or None."""

    def planned(settings: Changes) -> StageMemory:
        changes = {f"{stage}.{name}": value for name, value in settings.items()}
        return plan_stage(stage, changed(parameters, changes), shape, hardware)

    block = {"micro_batch_tokens": TOKENS[0][0]} | parameters[stage]
    config = BLOCKS[stage].model_validate(block)
    batches = [*_batches(config, hardware.world)]
    for tokens, strategy in product(TOKENS, [*_strategies(config, shape, hardware, method)]):
        # Micro batches, and batches for generation, larger ones first.
        sizes = [
            strategy | {"micro_batch_tokens": number} | batch
            for number, batch in product(tokens, batches)
        ]
        if fits(planned(sizes[-1]), hardware):  # the smallest
            for settings in sizes:
                if fits(memory := planned(settings), hardware):
                    return settings, memory
    return None


def _batches(config: StageConfig, ranks: int) -> Iterator[Changes]:
    """Responses at a time, more ones first, beside all models of the training or without them."""
    rooms: list[Changes] = [{}]
    if isinstance(config, PPOConfig):
        answers = config.rollout_batch_size
        rooms.append({"offload_during_rollout": True})
    elif isinstance(config, EvaluateConfig):
        answers = config.prompts
    else:
        yield {}
        return
    useful = [rows for rows in ROWS if rows < 2 * answers / ranks] or ROWS[-1:]
    for rows, room in product(useful, rooms):
        yield {"sampling.batch_size_per_gpu": rows, **room}


def _strategies(
    config: StageConfig, shape: Shape, hardware: Hardware, method: Method
) -> Iterator[Changes]:
    """What is sharded, recomputed and offloaded, cheaper ones first. At stage 3, which reduces
    gradients in bf16 anyway, sums in bf16 are exact where each rank has one row of a minibatch."""
    sharded, by_layer = hardware.world > 1, {"gather_for_generation": False}
    if isinstance(config, EvaluateConfig):
        for generator in GENERATORS:
            yield {"generator": generator, "precision": "bf16", "zero_stage": 0}
        if sharded:
            yield {"generator": "transformers", "precision": "bf16", "zero_stage": 3, **by_layer}
        return
    models, is_ppo = config.models(), isinstance(config, PPOConfig)
    one_row = isinstance(config, PPOConfig) and config.minibatch_size == hardware.world
    frozen_models = [model.name for model in models if isinstance(model, FrozenModel)]
    # The block of a supervised stage is that of its model.
    trained = [
        f"{model.name}." if is_ppo else "" for model in models if isinstance(model, TrainedModel)
    ]
    generators = GENERATORS if method != "qlora" else GENERATORS[1:]
    for generator, (zero, recomputes, more) in product(
        generators if is_ppo else ("",), _training(hardware, method)
    ):
        deepspeed: Changes = {"zero_stage": zero, "precision": "bf16"}
        deepspeed |= {"kernels": "liger"} if shape.model_type in LIGER else {}
        deepspeed |= ({"accumulate": "bf16"} if one_row and zero == 3 else {}) | more
        settings: Changes = {"generator": generator} if is_ppo else {}
        for model in trained:
            settings |= {f"{model}gradient_checkpointing": True} if recomputes else {}
            settings[f"{model}deepspeed"] = deepspeed
        rollouts: list[Changes] = [{}]
        if is_ppo and zero == 3:
            ways = gcd(8, hardware.ranks, shape.kv_heads)
            split = {"hybrid.inference_tp_size": ways}
            rollouts.append(split if generator == "vllm" else by_layer)
        for frozen, rollout in product(
            _frozen(frozen_models, sharded and zero < 3) if recomputes else ({},), rollouts
        ):
            yield settings | rollout | frozen


def _training(hardware: Hardware, method: Method) -> Iterator[tuple[int, bool, Changes]]:
    """ZeRO stage, gradient checkpointing, and what else. Within a machine, stage 2 costs less than
    checkpointing. Between machines, it sends gradients for each micro batch, and stage 1 once."""
    sharded, apart = hardware.world > 1, hardware.nodes > 1
    yield (1, False, {})
    if method == "full" and sharded and not apart:
        yield (2, False, {})
    yield (1, True, {})
    if method == "full":
        yield from ((1, True, {"accumulate": "bf16"}),) if apart else ()
        yield from ((2, True, {}), (3, True, {})) if sharded else ()
        offloads = {"offload_optimizer": True}
        yield from ((2, True, offloads), (3, True, offloads)) if sharded else ((1, True, offloads),)
    elif method == "lora" and sharded:
        yield (3, True, {})


def _frozen(models: Sequence[str], sharded: bool) -> Iterator[Changes]:
    """Places of the frozen models: a whole copy, shards, main memory."""
    yield {}
    if models and sharded:
        yield {f"{model}.deepspeed": {"zero_stage": 3} for model in models}
    if models:
        block = {"zero_stage": 3, "offload_parameters": True}
        yield {f"{model}.deepspeed": block for model in models}


def as_yaml(preset: Preset, name: str) -> str:
    """The file parameters.yml of the environment `name`."""
    hardware, parameters = preset.hardware, preset.parameters
    header = Path(__file__).with_name("header.yml.j2").read_text(encoding="utf-8")
    chosen = {str(value) for _, value in leaves(parameters)}
    extras = {"vllm": "vllm", "liger": "liger", "nf4": "quantization"}
    main = max(memory.main_of_node(hardware.ranks) for memory in preset.memory.values())
    lines = Template(header, trim_blocks=True, undefined=StrictUndefined).render(
        preset=preset,
        name=name,
        hardware=hardware,
        gibibytes=(hardware.gpu_memory or 0) // GIB,
        sums={
            value["zero_stage"]
            for value, _ in preset.settings.values()
            if isinstance(value, Mapping) and "accumulate" in value
        },
        extras=", ".join(extra for value, extra in extras.items() if value in chosen),
        peaks=", ".join(f"{s} {ceil(m.peak / GIB)}" for s, m in preset.memory.items()),
        main=ceil(main / GIB),
    ).splitlines()  # fmt: skip
    for block, values in parameters.items():
        if values is None:
            lines += ["", f"{f'{block}: null':<42}  # {preset.settings[block].source}"]
        else:
            lines += ["", f"{block}:", *_block(values, block, preset.settings)]
    return "\n".join(lines) + "\n"


def _block(values: Mapping[str, Any], place: str, settings: Mapping[str, Value]) -> Iterator[str]:
    """The lines of a block: values, each with its source, and then blocks."""
    indent = "  " * (place.count(".") + 1)
    for name in sorted(values, key=lambda name: isinstance(values[name], Mapping)):
        found = settings.get(f"{place}.{name}")
        if found is None:
            yield f"{indent}{name}:"
            yield from _block(values[name], f"{place}.{name}", settings)
        else:
            line = f"{indent}{name}: {_text(found.value)}"
            yield f"{line:<42}  # {found.source}" if found.source else line


def _text(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return dumped.removesuffix("\n").removesuffix("\n...")
