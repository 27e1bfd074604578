"""Whether a stage fits its hardware, and the first change of its parameters that makes it fit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic import ValidationError

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.stages import BLOCKS
from rlhf_pipeline.config.training import TrainedModel
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.hardware import GIB, Hardware
from rlhf_pipeline.sizing.models import Shape
from rlhf_pipeline.sizing.stages import Parameters, StageLoad, StageMemory, plan_stage

USABLE = 0.92
"""Share of the memory that tensors can fill: the allocator leaves gaps, and GPUs with ECC have up
to 8% less than their data sheets say (a T4 14.8 of 16 GiB)."""

Changes = dict[str, Any]
"""Values by dotted parameter name."""


@dataclass(frozen=True)
class Need:
    """What a stage needs of one kind of memory, in bytes."""

    kind: str
    """Empty for a rank's own memory, else words that follow the size."""
    found: int
    available: int | None
    """None if it is not known."""

    @property
    def is_met(self) -> bool:
        return self.available is None or self.found <= self.available

    def __str__(self) -> str:
        expected = "?" if self.available is None else size_text(self.available)
        return f"found {size_text(self.found)}{self.kind}, expected at most {expected}"


@dataclass(frozen=True)
class Fit:
    """Whether a stage fits its hardware, and what makes it fit."""

    memory: StageMemory
    before: Need
    """The memory that is not enough; if the stage fits, that of a rank."""
    changes: Changes | None
    """Empty if the stage fits as it is; None if no known change makes it fit."""
    after: Need
    """The same memory with the changes, or else the least of it that any change needs."""

    @property
    def fits(self) -> bool:
        return self.changes == {}

    @property
    def fix(self) -> str:
        if self.changes is None:
            return "use more or larger GPUs, or a smaller model"
        values = (f"{name}={json.dumps(value)}" for name, value in self.changes.items())
        return "--params=" + ",".join(values).replace('"', "")


def size_text(size: float) -> str:
    """Bytes in MiB, GiB or TiB."""
    if size >= 1000 * GIB:
        return f"{size / GIB / 1024:.1f} TiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def needs(memory: StageMemory, hardware: Hardware) -> tuple[Need, Need]:
    """What a stage needs of a rank's own memory, and of the main memory of a node."""

    def usable(size: int | None) -> int | None:
        return None if size is None else int(USABLE * size)

    main = memory.main_of_node(hardware.ranks)
    return (
        Need("", memory.peak, usable(hardware.rank_memory)),
        Need(" of main memory on each node", main, usable(hardware.main_memory)),
    )


def fits(memory: StageMemory, hardware: Hardware) -> bool:
    """Whether GPU and main memory suffice."""
    return all(need.is_met for need in needs(memory, hardware))


def find_fit(stage: str, parameters: Parameters, shape: Shape, hardware: Hardware) -> Fit:
    """Whether a stage fits, or the first change or sum of changes that makes it fit: smaller micro
    batches cost time alone, so they come first; LoRA, which changes the result, comes last."""
    memory = plan_stage(stage, parameters, shape, hardware)
    before = needs(memory, hardware)
    if fits(memory, hardware):
        return Fit(memory, before[0], {}, before[0])
    unmet = next(place for place, need in enumerate(before) if not need.is_met)

    def after(steps: Sequence[Changes]) -> StageMemory:
        with suppress(ValidationError):
            return plan_stage(stage, changed(parameters, *steps), shape, hardware)
        return memory  # the change does not fit the other parameters

    steps = list(_steps(stage, parameters, hardware))
    trials = [[step] for step in steps] + [steps[: end + 1] for end in range(len(steps))]
    chosen = next((trial for trial in trials if fits(after(trial), hardware)), None)
    if chosen is None:
        left = (needs(after(trial), hardware)[unmet] for trial in trials)
        return Fit(memory, before[unmet], None, min(left, key=lambda need: need.found))
    for step in reversed(chosen):
        rest = [each for each in chosen if each is not step]
        chosen = rest if fits(after(rest), hardware) else chosen
    changes = {name: value for step in chosen for name, value in step.items()}
    return Fit(memory, before[unmet], changes, needs(after(chosen), hardware)[unmet])


def automatic(parameters: Parameters) -> list[str]:
    """The stages whose `micro_batch_tokens` is auto."""
    blocks = {stage: parameters[stage] or {} for stage in BLOCKS}
    return [stage for stage in blocks if blocks[stage].get("micro_batch_tokens") == "auto"]


def micro_batch_tokens(
    parameters: Parameters, shape: Shape | None, hardware: Hardware
) -> dict[str, int]:
    """The numbers for `automatic` stages: each is the largest power of two with which the stage
    fits, at most the first that holds a rank's whole batch; 1 if no number fits.

    Raises ConfigError if the sizes of the model or the memory are not known.
    """
    numbers = dict.fromkeys(automatic(parameters), 1)
    for stage in numbers:
        name = f"{stage}.micro_batch_tokens"
        if shape is None or hardware.rank_memory is None:
            unknown = "size of base_model" if shape is None else "memory of the GPUs"
            raise ConfigError(f"{name}: found auto, expected a known {unknown}. Fix: set a number")
        for tokens in (2**power for power in count()):
            trial = changed(parameters, {name: tokens})
            if not fits(plan_stage(stage, trial, shape, hardware), hardware):
                break
            numbers[stage] = tokens
            if StageLoad.of(stage, trial, hardware).rows.passes == 1:
                break
    return numbers


def changed(parameters: Mapping[str, Any], *changes: Changes) -> dict[str, Any]:
    """The parameters with other values; later changes win."""
    copy = deepcopy(dict(parameters))
    for name, value in (item for each in changes for item in each.items()):
        *places, last = name.split(".")
        block = copy
        for place in places:
            if block.get(place) is None:
                block[place] = {}
            block = block[place]
        block[last] = value
    return copy


def _steps(stage: str, parameters: Mapping[str, Any], hardware: Hardware) -> Iterator[Changes]:
    config = BLOCKS[stage].model_validate(parameters[stage])
    values = leaves(config.model_dump(), f"{stage}.")
    for ending in (".micro_batch_tokens", ".sampling.batch_size_per_gpu"):
        for name, value in values:
            if name.endswith(ending):  # a half, a quarter and so on
                yield from ({name: value >> power} for power in range(1, value.bit_length()))
    if isinstance(config, EvaluateConfig):
        if hardware.world > 1:
            yield {"evaluate.zero_stage": 3}
        return

    def each(suffix: str, value: Any) -> Changes:
        return {
            f"{model.block}.{suffix}": value
            for model in config.models()
            if isinstance(model, TrainedModel)
        }

    yield each("gradient_checkpointing", True)
    if hardware.world > 1:
        yield each("deepspeed.zero_stage", 2)
        yield each("deepspeed.zero_stage", 3)
    if hardware.on_gpu:
        yield each("deepspeed.precision", "bf16")
        yield each("deepspeed.offload_optimizer", True)
        yield each("deepspeed.zero_stage", 3) | each("deepspeed.offload_parameters", True)
    yield each("lora.rank", 16)
