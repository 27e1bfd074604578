"""Loading models: whole, or sharded while they are read; frozen ones as they are used."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from rlhf_pipeline.config.block import Precision
from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.distributed.deepspeed_config import inference_settings
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, deepspeed
from rlhf_pipeline.distributed.world import World, on_gpu, own_device
from rlhf_pipeline.distributed.zero import sharded_loading
from rlhf_pipeline.models.forward import warn_of_padding
from rlhf_pipeline.models.loading import freeze
from rlhf_pipeline.models.self_check import require_sound_kernels
from rlhf_pipeline.runtime import heartbeat

M = TypeVar("M", bound=nn.Module)


def frozen_model(
    load: Callable[..., M], config: FrozenDeepSpeedConfig, world: World
) -> M | DeepSpeedEngine:
    """Load a model: at ZeRO stage 0, whole on every rank; at stage 3, an engine that shards it.

    `load` is that of `train_engine`; `config` contains stage and precision, see
    `FrozenModelConfig.beside`.
    """
    precision = config.precision
    assert precision is not None and config.zero_stage is not None
    if config.zero_stage == 0:
        require_sound_kernels(world.device, precision)
        whole = freeze(load(precision, **_placement(world.device))).to(world.device)
        warn_of_padding(whole)
        return whole
    model, settings = loaded(load, precision, partial(inference_settings, config))
    engine, *_ = deepspeed.initialize(model=freeze(model), config=settings)
    engine.eval()
    warn_of_padding(engine)
    return engine


def loaded(
    load: Callable[..., M], precision: Precision, settings: Callable[..., dict[str, Any]]
) -> tuple[M, dict[str, Any]]:
    """The model, and the DeepSpeed settings for its width, which is known only after loading."""
    require_sound_kernels(own_device(), precision)
    before = settings(hidden_size=0, on_gpu=on_gpu())
    is_sharded = before["zero_optimization"]["stage"] == 3
    with sharded_loading(before):
        model = load(precision, **({} if is_sharded else _placement(own_device())))
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


def _placement(device: torch.device) -> dict[str, torch.device]:
    """The argument that makes `load` read weights onto a GPU, never whole into main memory.

    The ranks of a machine would otherwise hold a copy each at the same time.
    """
    return {"device": device} if device.type == "cuda" else {}


def release_freed() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed blocks below 32 MiB for later ones. Loading a model, or sampling with a second
    copy of its weights, leaves hundreds of MiB there, and the tensors of training do not fit the
    gaps. The call takes milliseconds. It has no effect without glibc.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
