"""Whether a stage fits, and the cheapest change that makes it fit."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from rlhf_pipeline.sizing.hardware import Hardware
from rlhf_pipeline.sizing.lengths import Lengths
from rlhf_pipeline.sizing.shape import Shape
from rlhf_pipeline.sizing.stages import USABLE, StageMemory, plan_stage

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
    return main is None or memory.main * hardware.ranks <= USABLE * main


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
    memory = plan_stage(stage, parameters, shape, hardware, lengths)
    if fits(memory, hardware):
        return Fit(memory, available(hardware), {}, memory)
    steps = [step for step in _steps(stage, parameters, hardware) if step]
    sums = list(accumulate(steps, lambda one, other: one | other))
    smallest = memory
    for changes in [*steps, *sums]:
        try:
            after = plan_stage(stage, changed(parameters, changes), shape, hardware, lengths)
        except ValidationError:  # the change does not fit the other parameters
            continue
        if fits(after, hardware):
            return Fit(memory, available(hardware), changes, after)
        smallest = min(smallest, after, key=lambda each: each.peak)
    return Fit(memory, available(hardware), None, smallest)


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
    block = parameters[stage]
    tokens = block.get("micro_batch_tokens")
    longest = 0
    if tokens:
        split = parameters["split"]
        longest = split.get("max_prompt_tokens", 512) + split.get("max_response_tokens", 256)
        smaller = [tokens // 2**power for power in range(1, 12) if tokens // 2**power >= longest]
        for value in smaller:
            yield {f"{stage}.micro_batch_tokens": value}
    if stage == "evaluate":
        return
    trained = (
        [stage]
        if stage != "ppo"
        else [f"ppo.{name}" for name in ("actor", "critic") if block.get(name) is not None]
    )

    def each(suffix: str, value: Any) -> Changes:
        return {f"{model}.{suffix}": value for model in trained}

    yield each("gradient_checkpointing", True)
    if hardware.world > 1:
        yield each("deepspeed.zero_stage", 2)
        yield each("deepspeed.zero_stage", 3)
    if hardware.on_gpu:
        yield each("deepspeed.precision", "bf16")
        yield each("deepspeed.offload_optimizer", True)
        yield each("deepspeed.zero_stage", 3) | each("deepspeed.offload_parameters", True)
    yield each("lora.rank", 16)
