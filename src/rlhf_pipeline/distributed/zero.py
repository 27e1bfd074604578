"""ZeRO-3 keeps a shard of every weight on each rank. Where weights are loaded, read or written whole, it happens here.

Everything here is a collective: all ranks call it together, for models at any stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config


@contextmanager
def sharded_loading(settings: dict[str, Any]) -> Iterator[None]:
    """Models that are loaded in here are sharded as they are read, if `settings` say stage 3.

    transformers looks for a DeepSpeed configuration that is alive anywhere in the process: were it to outlive the
    loading of one model, the next would be sharded, too, whatever its own stage is.
    """
    if settings["zero_optimization"]["stage"] != 3:
        yield
        return
    alive = HfDeepSpeedConfig(settings)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """The parameters are whole in here, and what all ranks write to them alike is kept."""
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
        yield


@contextmanager
def for_generation(engine: DeepSpeedEngine, *, gather: bool = True) -> Iterator[nn.Module]:
    """The engine's model in eval mode, its weights whole if `gather`.

    In training mode a model with gradient checkpointing would drop its key-value cache.
    """
    engine.eval()
    try:
        if engine.zero_optimization_stage() == 3 and gather:
            unwrapped = unwrap_model_for_generation(engine)
            unwrapped.__enter__()
            try:
                yield engine.module
            finally:
                # It restores the hooks of ZeRO-3 only if it does not hear of an error.
                unwrapped.__exit__(None, None, None)
        else:
            yield engine.module
    finally:
        engine.train()


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight is in shards."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_state_dict(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """All weights and buffers, or those of these names, as `state_dict()` names them. Of a sharded model they are copies in
    main memory, and only on the first rank; the others get an empty dictionary. One weight at a time is whole on the
    device."""
    if not is_sharded(model):
        weights = model.state_dict()
        return weights if names is None else {name: weights[name] for name in names}
    first = torch.distributed.get_rank() == 0
    copies: dict[int, Tensor] = {}  # tied weights stay one tensor, so that they are written once
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if names is not None and name not in names:
            continue
        with deepspeed.zero.GatheredParameters([tensor]):
            if first:
                whole[name] = copies.setdefault(id(tensor), tensor.detach().cpu().clone())
    return whole


def fp32_shards(engine: DeepSpeedEngine) -> list[Tensor]:
    """The weights in training that this rank's optimizer holds, in fp32: a share of them from ZeRO-1 on, else all."""
    match engine.zero_optimization_stage():
        case 0:
            return [
                parameter for parameter in engine.module.parameters() if parameter.requires_grad
            ]
        case 3:
            return list(engine.optimizer.fp32_partitioned_groups_flat)
        case _:
            return list(engine.optimizer.single_partition_of_fp32_groups)


@dataclass(frozen=True)
class Piece:
    """A run of numbers of one parameter, and where in a shard they lie."""

    name: str
    start: int
    """Position of the first of them in the flattened parameter."""
    size: int
    offset: int
    """Position of the first of them in the flattened shard."""

    @property
    def shard_slice(self) -> slice:
        """Where in the flattened shard they lie."""
        return slice(self.offset, self.offset + self.size)


def pieces(engine: DeepSpeedEngine) -> list[list[Piece]]:
    """What each of `fp32_shards(engine)` is made of; what is not in a piece is padding."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    match engine.zero_optimization_stage():
        case 0:
            trained = [
                parameter for parameter in engine.module.parameters() if parameter.requires_grad
            ]
            return [[Piece(names[id(parameter)], 0, parameter.numel(), 0)] for parameter in trained]
        case 3:
            return [_own_parts(group, names) for group in engine.optimizer.fp16_groups]
        case _:
            groups = engine.optimizer.round_robin_bit16_groups
            return [
                _own_run(group, size, names)
                for group, size in zip(groups, engine.optimizer.partition_size, strict=True)
            ]


def _own_parts(parameters: list[nn.Parameter], names: dict[int, str]) -> list[Piece]:
    """ZeRO-3 gives each rank an equal part of every parameter."""
    found, offset = [], 0
    for parameter in parameters:
        size = cast(Any, parameter).partition_numel()
        start = torch.distributed.get_rank() * size
        found.append(
            Piece(
                names[id(parameter)],
                start,
                max(0, min(size, cast(Any, parameter).ds_numel - start)),
                offset,
            )
        )
        offset += size
    return found


def _own_run(parameters: list[nn.Parameter], size: int, names: dict[int, str]) -> list[Piece]:
    """ZeRO-1 and 2 lay the parameters end to end and give each rank an equal run of that."""
    found, position, begin = [], 0, torch.distributed.get_rank() * size
    for parameter in parameters:
        first, last = max(position, begin), min(position + parameter.numel(), begin + size)
        if first < last:
            found.append(Piece(names[id(parameter)], first - position, last - first, first - begin))
        position += parameter.numel()
    return found


def spread_fp32_shards(engine: DeepSpeedEngine) -> None:
    """Make the engine's model what its `fp32_shards` say, as DeepSpeed does after an optimizer step."""
    optimizer = engine.optimizer
    match engine.zero_optimization_stage():
        case 0:
            pass  # they are the model's own
        case 3:
            optimizer._partition_all_parameters()
            for group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        case _:
            optimizer.update_lp_params()
