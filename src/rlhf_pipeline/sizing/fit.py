"""Whether a stage fits, and the cheapest change that makes it fit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlhf_pipeline.sizing.hardware import GIB, Hardware
from rlhf_pipeline.sizing.lengths import Lengths
from rlhf_pipeline.sizing.shape import Shape
from rlhf_pipeline.sizing.stages import BLOCKS, USABLE, StageMemory, plan_stage

Changes = dict[str, Any]
"""Values by dotted parameter name."""


@dataclass(frozen=True)
class Fit:
    """The answer for one stage."""

    memory: StageMemory
    available: int | None
    """Bytes that a rank may use; None if they are not known."""
    changes: Changes | None
    """Empty: it fits as it is. None: no known change makes it fit."""
    memory_after: StageMemory
    """With the changes, the smallest one that was found."""

    @property
    def fits(self) -> bool:
        """Whether the stage fits without a change."""
        return self.changes == {}

    @property
    def fix(self) -> str:
        """The change, in words."""
        if self.changes is None:
            return "use more or larger GPUs, or a smaller model"
        values = (f"{name}={json.dumps(value)}" for name, value in self.changes.items())
        return "--params=" + ",".join(values).replace('"', "")


def size_text(size: float) -> str:
    """Bytes in MiB, GiB or TiB."""
    if size >= 1000 * GIB:
        return f"{size / GIB / 1024:.1f} TiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def available(hardware: Hardware) -> int | None:
    """Bytes that a rank may use; None if they are not known."""
    memory = hardware.rank_memory
    return None if memory is None else int(USABLE * memory)


def fits(memory: StageMemory, hardware: Hardware) -> bool:
    """Whether GPU and main memory suffice; what is not known suffices."""
    limit = available(hardware)
    if limit is not None and memory.peak > limit:
        return False
    main = hardware.main_memory
    return main is None or memory.main_of_node(hardware.ranks) <= USABLE * main


def find_fit(
    stage: str,
    parameters: Mapping[str, Any],
    shape: Shape,
    hardware: Hardware,
    lengths: Mapping[str, Lengths] | None = None,
) -> Fit:
    """Whether a stage fits; otherwise the first change, or sum of changes, that makes it fit.

    The changes are in the order of what they cost: smaller micro batches cost nothing but time;
    LoRA comes last, since it changes the result.
    """
    memory, limit = plan_stage(stage, parameters, shape, hardware, lengths), available(hardware)
    if fits(memory, hardware):
        return Fit(memory, limit, {}, memory)

    def after(changes: Changes) -> StageMemory | None:
        try:
            return plan_stage(stage, changed(parameters, changes), shape, hardware, lengths)
        except ValidationError:  # the change does not fit the other parameters
            return None

    def suffices(steps: Sequence[Changes]) -> bool:
        found = after(_merged(steps))
        return found is not None and fits(found, hardware)

    steps = list(_steps(stage, parameters, hardware))
    trials = [[step] for step in steps] + [steps[: end + 1] for end in range(len(steps))]
    chosen = next((trial for trial in trials if suffices(trial)), None)
    if chosen is None:
        tried = [memory, *filter(None, map(after, map(_merged, trials)))]
        return Fit(memory, limit, None, min(tried, key=lambda each: each.peak))
    for step in reversed(chosen):
        rest = [each for each in chosen if each is not step]
        chosen = rest if suffices(rest) else chosen
    changes = _merged(chosen)
    return Fit(memory, limit, changes, after(changes) or memory)


def _merged(steps: Sequence[Changes]) -> Changes:
    return {name: value for step in steps for name, value in step.items()}


def changed(parameters: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The parameters with other values."""
    copy = deepcopy(dict(parameters))
    for name, value in changes.items():
        *places, last = name.split(".")
        block = copy
        for place in places:
            if block.get(place) is None:
                block[place] = {}
            block = block[place]
        block[last] = value
    return copy


def _steps(stage: str, parameters: Mapping[str, Any], hardware: Hardware) -> Iterator[Changes]:
    """Changes in the order of their cost."""
    block = BLOCKS[stage].model_validate(parameters[stage]).model_dump()
    for name in ("micro_batch_tokens", "sampling.batch_size_per_gpu"):
        yield from _halves(f"{stage}.{name}", {stage: block})
    if stage == "evaluate":
        if hardware.world > 1:
            yield {"evaluate.zero_stage": 3}
        return
    models = [stage] if stage != "ppo" else ["ppo.actor", "ppo.critic"]
    if stage == "ppo" and block.get("critic") is None:
        models.remove("ppo.critic")

    def each(suffix: str, value: Any) -> Changes:
        return {f"{model}.{suffix}": value for model in models}

    yield each("gradient_checkpointing", True)
    if hardware.world > 1:
        yield each("deepspeed.zero_stage", 2)
        yield each("deepspeed.zero_stage", 3)
    if hardware.on_gpu:
        yield each("deepspeed.precision", "bf16")
        yield each("deepspeed.offload_optimizer", True)
        yield each("deepspeed.zero_stage", 3) | each("deepspeed.offload_parameters", True)
    yield each("lora.rank", 16)


def _halves(name: str, parameters: Mapping[str, Any]) -> Iterator[Changes]:
    """A half, a quarter and so on of a parameter; nothing if the stage has no such parameter."""
    value: Any = parameters
    for place in name.split("."):
        value = value.get(place) or {}
    while isinstance(value, int) and value > 1:
        value //= 2
        yield {name: value}
