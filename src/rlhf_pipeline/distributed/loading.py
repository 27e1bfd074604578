"""Loading a model for an engine: sharded while it is read, or read onto the rank's own GPU."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.distributed.world import on_gpu, own_device
from rlhf_pipeline.distributed.zero import sharded_loading
from rlhf_pipeline.models.self_check import require_sound_kernels
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heap import release_freed

M = TypeVar("M", bound=nn.Module)


def loaded(
    load: Callable[..., M], precision: Precision, settings: Callable[..., dict[str, Any]]
) -> tuple[M, dict[str, Any]]:
    """The model, and the DeepSpeed settings for its width, which is known only after loading."""
    require_sound_kernels(own_device(), precision)
    before = settings(hidden_size=0, on_gpu=on_gpu())
    is_sharded = before["zero_optimization"]["stage"] == 3
    with sharded_loading(before):
        model = load(precision, **({} if is_sharded else placement(own_device())))
    _exact_frequencies(model)
    release_freed()  # weights that were whole until they were sharded
    heartbeat.tick()
    return model, settings(hidden_size=cast(Any, model.config).hidden_size, on_gpu=on_gpu())


def _exact_frequencies(model: nn.Module) -> None:
    """Compute rotary frequencies in float32.

    Under DeepSpeed's `zero.Init`, transformers 5.17 to 5.20 round them to the precision of the
    weights. Whoever loads the export would compute other logits than training did.
    """
    for module in model.modules():
        rounded = getattr(module, "inv_freq", None)
        if rounded is not None and rounded.dtype != torch.float32:
            for name, exact in type(module)(module.config).named_buffers():
                module.register_buffer(name, exact.to(rounded.device), persistent=False)


def placement(device: torch.device) -> dict[str, torch.device]:
    """The argument that makes `load` read weights onto a GPU, never whole into main memory.

    The ranks of a machine would otherwise hold a copy each at the same time.
    """
    return {"device": device} if device.type == "cuda" else {}
