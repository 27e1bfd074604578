"""Presets: published hyper-parameters (recipes.yml) and memory settings, as an environment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.presets.placement import STAGES, Method, place
from rlhf_pipeline.sizing.fit import changed
from rlhf_pipeline.sizing.hardware import GIB, Hardware, named
from rlhf_pipeline.sizing.models import find_model
from rlhf_pipeline.sizing.stages import StageMemory

RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yml").read_text(encoding="utf-8"))
SOURCES: Mapping[str, str] = RECIPES["sources"]
"""The publications."""
ADAPTERS: Mapping[str, tuple[dict[str, Any], str]] = RECIPES["adapters"]
"""The block `lora` of each method, and its source."""
LORA_FACTOR = 10
"""Learning rate of adapters, relative to that of whole models."""
RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"
METHODS: tuple[Method, ...] = get_args(Method)
HARDWARE = (
    *("1x16", "1x24", "1x40", "1x80", "1x141"),
    *("8x24", "8x40", "8x80", "8x141"),
    *("2x8x80", "4x8x80", "8x8x80"),
)
"""The hardware of the table, smaller first. Other hardware has presets as well."""
TRAINED = ("sft", "reward_model", "ppo.actor", "ppo.critic", "dpo", "kto")


class Value(NamedTuple):
    """A value of a parameter, and its source."""

    value: Any
    source: str


@dataclass(frozen=True)
class Preset:
    """Parameters, and the memory that they need."""

    model: str
    gpus: str
    method: Method
    settings: Mapping[str, Value]
    """Values by dotted name, with the source or reason of each."""
    memory: Mapping[str, StageMemory]
    """By stage."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.gpus}" + (f"-{self.method}" if self.method != "full" else "")

    @property
    def hardware(self) -> Hardware:
        return named(None, self.gpus)

    @property
    def parameters(self) -> dict[str, Any]:
        return changed({}, {name: value for name, (value, _) in self.settings.items()})


def make_preset(model: str, gpus: str, method: Method) -> Preset:
    """The preset of a model, by its short name, on hardware such as 8x80 or 2x8x80.

    Raises ConfigError if the model is unknown or does not fit; the message says what fits.
    """
    preset = find_preset(model, gpus, method)
    if preset is not None:
        return preset
    larger = (size for size in HARDWARE if find_preset(model, size, method) is not None)
    fixes = [f"--gpus {size}" for size in larger][:1]
    fixes += [f"--method {each}" for each in METHODS if find_preset(model, gpus, each) is not None]
    raise ConfigError(
        f"--gpus: found {gpus}, expected more memory for {model} with --method {method}. Fix: use "
        f"{', or '.join(fixes) or 'a smaller model'}"
    )


def find_preset(model: str, gpus: str, method: Method) -> Preset | None:
    """The preset; None if a stage does not fit. Raises ConfigError if a name is unknown."""
    hardware, published = named(None, gpus), find_model(model)
    settings = {
        "base_model.path": Value(published.path, ""),
        **dict(_launch(hardware)),
        **dict(_shared_evenly(hyperparameters(model, method), hardware.world)),
    }
    if method in ADAPTERS:
        settings |= {f"{name}.lora": Value(*ADAPTERS[method]) for name in TRAINED}
    parameters = changed({}, {name: value for name, (value, _) in settings.items()})
    memory = {}
    for stage in STAGES:
        placed = place(stage, parameters, published.shape, hardware, method)
        if placed is None:
            return None
        settings |= {f"{stage}.{name}": Value(value, "") for name, value in placed[0].items()}
        memory[stage] = placed[1]
    return Preset(model, gpus, method, settings, memory)


def hyperparameters(model: str, method: Method) -> dict[str, Value]:
    """Values by dotted name: data, and the recipe of each stage.

    Raises ConfigError if the model is unknown.
    """
    size = find_model(model).shape.parameters
    family = next(name for name in RECIPES["families"] if model.startswith(name))
    published = RECIPES["common"] | RECIPES["families"][family]
    published |= RECIPES["ppo_above_8b" if size > 8.5e9 else "ppo"]
    published |= RECIPES["above_30b"] if size > 29e9 else {}
    published |= RECIPES["above_60b"].get(family, {}) if size > 60e9 else {}
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


def _launch(hardware: Hardware) -> Iterator[tuple[str, Value]]:
    yield "launch.processes", Value(hardware.ranks, "ranks of each node, one for each GPU")
    if hardware.nodes > 1:
        command = f"srun --nodes={hardware.nodes} --ntasks-per-node={hardware.ranks} {{command}}"
        yield "launch.mode", Value("command", "or hostfile: docs/cluster.md")
        yield "launch.nodes", Value(hardware.nodes, "")
        yield "launch.command", Value(command, "SLURM starts the ranks of a stage")


def _shared_evenly(values: Mapping[str, Value], ranks: int) -> Iterator[tuple[str, Value]]:
    """Batch sizes that the ranks can share, at least as large as the published ones."""
    unit = ranks
    for name, (value, source) in sorted(values.items(), key=lambda each: "rollout" in each[0]):
        if name.endswith("batch_size"):
            # The responses of a step are whole minibatches.
            size = unit * ceil(value / unit)
            source = source if size == value else f"for {ranks} ranks; {source} has {value}"
            value = size
        unit = value if name == "ppo.minibatch_size" else unit
        yield name, Value(value, source)


def as_yaml(preset: Preset, name: str) -> str:
    """The file parameters.yml of the environment `name`."""
    lines = [f"# {line}".rstrip() for line in _header(preset, name)]
    for block, values in preset.parameters.items():
        lines += ["", f"{block}:"]
        lines += _block(values, block, preset.settings)
    return "\n".join(lines) + "\n"


def _block(values: Mapping[str, Any], place: str, settings: Mapping[str, Value]) -> Iterator[str]:
    """The lines of a block: single values, then blocks on one line, then other blocks."""
    indent = "  " * (place.count(".") + 1)

    def order(name: str) -> int:
        is_block = isinstance(values[name], Mapping)
        return is_block + (is_block and f"{place}.{name}" not in settings)

    for name in sorted(values, key=order):
        found = settings.get(f"{place}.{name}")
        if found is None:
            yield f"{indent}{name}:"
            yield from _block(values[name], f"{place}.{name}", settings)
        else:
            line = f"{indent}{name}: {_text(found.value)}"
            yield f"{line:<42}  # {found.source}" if found.source else line


def _header(preset: Preset, name: str) -> Iterator[str]:
    hardware = preset.hardware
    size = (hardware.gpu_memory or 0) // GIB
    machines = f"{hardware.ranks} GPU{'s' * (hardware.ranks > 1)} of {size} GB"
    machines += f" on each of {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    trained = {"full": "all weights train", "lora": "LoRA", "qlora": "QLoRA"}[preset.method]
    method = "" if preset.method == "full" else f" --method {preset.method}"
    peaks = ", ".join(f"{s} {ceil(m.peak / GIB)}" for s, m in preset.memory.items())
    main = max(memory.main_of_node(hardware.ranks) for memory in preset.memory.values())
    yield f"{preset.model} on {machines}; {trained}."
    yield f"Written by `kedro rlhf preset {preset.model} --gpus {preset.gpus}{method}`."
    yield ""
    yield f"  kedro rlhf plan --env={name} --gpus={preset.gpus} --check"
    yield f"  kedro run --env={name}" + (
        "        # on the first node" if hardware.nodes > 1 else ""
    )
    yield ""
    yield f"Expected peak of a GPU in GiB: {peaks}."
    yield f"Expected main memory of a node: {ceil(main / GIB)} GiB."
    yield "Planned and checked, not run on a GPU. docs/presets.md has the sources of the values."
    if "accumulate" in preset.parameters["ppo"]["actor"]["deepspeed"]:
        yield "A rank has one row of a minibatch: no gradients add up, so `accumulate: bf16` loses"
        yield "nothing. Set it to fp32 with a larger ppo.minibatch_size."
    if preset.method == "qlora":
        yield "4-bit weights need the extra `quantization`."
    if preset.model == "opt-175b":
        yield "The weights are not on the hub: set base_model.path to your folder."
    if "llama" in preset.model:
        yield "The model is gated: accept its licence on the hub, and export HF_TOKEN."
    if hardware.gpu_memory == 16 * GIB:
        yield "T4 and V100 have no bf16: set `precision: fp16` in every block `deepspeed` there."


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if 0 < value < 0.01:
            digits, _, power = f"{value:e}".partition("e")
            whole, _, rest = digits.rstrip("0").partition(".")
            return f"{whole}.{rest or 0}e{int(power)}"
        case dict():
            return "{" + ", ".join(f"{name}: {_text(each)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
