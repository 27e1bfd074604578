from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import nn

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig
from rlhf_pipeline.distributed.deepspeed_config import inference_settings
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, deepspeed
from rlhf_pipeline.distributed.loading import loaded, placement
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import warn_of_padding
from rlhf_pipeline.models.loading import freeze
from rlhf_pipeline.models.self_check import require_sound_kernels

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
        whole = freeze(load(precision, **placement(world.device))).to(world.device)
        warn_of_padding(whole)
        return whole
    model, settings = loaded(load, precision, partial(inference_settings, config))
    engine, *_ = deepspeed.initialize(model=freeze(model), config=settings)
    engine.eval()
    warn_of_padding(engine)
    return engine
