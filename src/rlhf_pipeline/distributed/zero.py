"""DeepSpeed, as all modules import it, and what it shards, at any ZeRO stage: weights, which a copy
that samples gets whole and with adapters merged, the shards of an optimizer, and their average.

All ranks call these functions together.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlhf_pipeline.models import PreTrainedModel
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.imports import hidden

# Without two things that DeepSpeed imports and that no program uses: its autotuner imports MLflow,
# which takes each rank a second and 90 MB; its Muon compiles three functions, and loading the
# compiler takes two seconds.
with hidden("mlflow"), patch.object(torch, "compile", lambda function: function):
    import deepspeed

    with suppress(ImportError):  # it is elsewhere in another version
        import deepspeed.runtime.zero.muon.muon_optimizer

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

__all__ = ["DeepSpeedEngine", "deepspeed", "get_accelerator"]


@contextmanager
def sharded_loading(settings: dict[str, Any]) -> Iterator[None]:
    """Shard models while they are loaded inside the block, if `settings` contain stage 3.

    transformers uses any DeepSpeed configuration that is alive in the process. If this one outlived
    the block, the next model would be sharded, too, at any stage.
    """
    alive = HfDeepSpeedConfig(settings) if settings["zero_optimization"]["stage"] == 3 else None
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive


@contextmanager
def gathered(parameters: Iterable[nn.Parameter], *, changes: bool = True) -> Iterator[None]:
    """Gather the parameters inside the block. `changes` keeps what all ranks change equally."""
    modifier = 0 if changes else None
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier):
        yield


@contextmanager
def for_generation(policy: nn.Module, *, gather: bool = True) -> Iterator[nn.Module]:
    """The model of an engine in eval mode; with `gather`, its weights are whole.

    In training mode, a model with gradient checkpointing would not use its key-value cache. A model
    without an engine is unchanged.
    """
    with ExitStack() as stack:
        if any(part._compiled_call_impl for part in policy.modules()):  # graphs know no cache
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not isinstance(policy, DeepSpeedEngine):
            yield policy
            return
        policy.eval()
        stack.callback(policy.train)
        if policy.zero_optimization_stage() == 3 and gather:
            unwrapped = unwrap_model_for_generation(policy)
            unwrapped.__enter__()
            # Given an error, it would not restore the hooks of ZeRO-3.
            stack.callback(unwrapped.__exit__, None, None, None)
        yield policy.module


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight is sharded."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a whole parameter, even if only a shard of it is present."""
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def whole_state_dict(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """All weights and buffers by their `state_dict()` names, or only those in `names`.

    For a sharded model, the first rank gets copies in main memory and the other ranks get an empty
    dictionary. Only one weight at a time is whole on the device.
    """
    shards = is_sharded(model)
    own = model.state_dict(keep_vars=shards)
    own = own if names is None else {name: x for name, x in own.items() if name in names}
    if not shards:
        return own
    whole: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # tied weights stay one tensor and are written once
    for name, tensor in own.items():
        with deepspeed.zero.GatheredParameters([tensor]):
            if torch.distributed.get_rank() == 0:
                whole[name] = copies.setdefault(id(tensor), tensor.detach().cpu().clone())
        heartbeat.report_progress()
    return whole


def fp32_shards(engine: DeepSpeedEngine) -> list[Tensor]:
    """The trainable weights that this rank's optimizer holds, in fp32: a share from ZeRO-1 on."""
    match engine.zero_optimization_stage():
        case 0:
            return [p for p in engine.module.parameters() if p.requires_grad]
        case 3:
            return list(engine.optimizer.fp32_partitioned_groups_flat)
        case _:
            return list(engine.optimizer.single_partition_of_fp32_groups)


def pieces(engine: DeepSpeedEngine, shards: Iterable[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """The pieces of parameters in shards like `fp32_shards(engine)`; the rest is padding.

    Each has the name of its parameter, its position there, and its numbers as a view of the shard.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    rank, optimizer = torch.distributed.get_rank(), engine.optimizer
    match engine.zero_optimization_stage():
        case 0:
            for parameter, shard in zip(fp32_shards(engine), shards, strict=True):
                yield names[id(parameter)], 0, shard.view(-1)
        case 3:  # an equal part of every parameter
            for group, shard in zip(optimizer.fp16_groups, shards, strict=True):
                offset = 0
                for parameter in group:
                    size = parameter.partition_numel()
                    own = max(0, min(size, parameter.ds_numel - rank * size))
                    yield names[id(parameter)], rank * size, shard[offset : offset + own]
                    offset += size
        case _:  # an equal part of the parameters one after the other
            groups = optimizer.round_robin_bit16_groups
            for group, size, shard in zip(groups, optimizer.partition_size, shards, strict=True):
                position = -rank * size  # of the parameter in the shard
                for parameter in group:
                    end = position + parameter.numel()
                    first, last = max(position, 0), min(end, size)
                    if first < last:
                        yield names[id(parameter)], first - position, shard[first:last]
                    position = end


def spread_fp32_shards(engine: DeepSpeedEngine) -> None:
    """Copy `fp32_shards` into the engine's model, as DeepSpeed does after an optimizer step."""
    optimizer = engine.optimizer  # at stage 0, the shards are the model's own weights
    if engine.zero_optimization_stage() == 3:
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)
    elif engine.zero_optimization_stage() > 0:
        optimizer.update_lp_params()


class EMA:
    """The average of one engine's weights; it starts at the present weights."""

    def __init__(self, engine: DeepSpeedEngine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self.shards = [shard.detach().clone() for shard in fp32_shards(engine)]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average; call it after each optimizer step."""
        for mean, shard in zip(self.shards, fp32_shards(self._engine), strict=True):
            mean.lerp_(shard, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[DeepSpeedEngine]:
        """Swap the average into the engine; on exit, restore its own weights bit for bit.

        All ranks enter and exit together. Take no optimizer step inside the block.
        """
        self._swap()
        try:
            yield self._engine
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, shard in zip(self.shards, fp32_shards(self._engine), strict=True):
            own = shard.clone()
            shard.copy_(mean)
            mean.copy_(own)
        spread_fp32_shards(self._engine)


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the device `meta`, without adapters: its modules and their paths."""
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(deepcopy(model.config))
    return plain.eval()


def whole_weights(source: PreTrainedModel, layers: int = 1) -> Iterator[tuple[str, Tensor]]:
    """All weights by their names without adapters, adapters merged.

    All ranks iterate together. The weights of `layers` layers are gathered at a time.
    """
    plain = without_weights(source)
    of_layer: dict[str, list[str]] = {}  # modules with parameters; outside of layers, one by one
    for path, module in plain.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            number = next((i for i, part in enumerate(path.split(".")) if part.isdigit()), None)
            layer = path if number is None else ".".join(path.split(".")[: number + 1])
            of_layer.setdefault(layer, []).append(path)
    pieces = [*of_layer.values()]
    for start in range(0, len(pieces), layers):
        paths = [path for piece in pieces[start : start + layers] for path in piece]
        owners = {path: source.get_submodule(path) for path in paths}
        parameters = [p for module in owners.values() for p in module.parameters()]
        with gathered(parameters, changes=False):
            for path, module in owners.items():
                for name, _ in plain.get_submodule(path).named_parameters(recurse=False):
                    yield f"{path}.{name}".lstrip("."), with_adapters(module, name).detach()


def with_adapters(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module; that of an adapted layer with its adapter added."""
    adapted: Any = module
    if not hasattr(module, "get_base_layer"):  # peft's layers have it
        return module.get_parameter(name)
    whole: Tensor = adapted.get_base_layer().get_parameter(name)
    if name != "weight":
        return whole
    added = sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
    return (whole + added).to(whole.dtype)
