"""Loading a model into a DeepSpeed engine that trains it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_pipeline.config.training import OptimizerConfig, TrainedModelConfig
from rlhf_pipeline.distributed.deepspeed_config import BUCKET, training_settings
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, deepspeed
from rlhf_pipeline.distributed.loading import loaded, release_freed
from rlhf_pipeline.distributed.world import on_gpu
from rlhf_pipeline.distributed.zero import whole_shape
from rlhf_pipeline.models.forward import warn_of_padding
from rlhf_pipeline.models.lora import add_adapters
from rlhf_pipeline.models.scalar_head import pretrained
from rlhf_pipeline.runtime import heartbeat


def train_engine(
    load: Callable[..., nn.Module], config: TrainedModelConfig, total_steps: int
) -> DeepSpeedEngine:
    """Load a model into a DeepSpeed engine with AdamW and a learning-rate schedule.

    `load` loads the model in a given precision. At ZeRO stage 3, the weights are sharded while they
    are read; at the other stages, `load` also gets the argument `device` if that is a GPU. With
    `lora.quantize`, it also gets `quantize`. The schedule ends after `total_steps` optimizer steps.
    """
    if config.lora is not None and config.lora.quantize is not None:
        load = partial(load, quantize=config.lora.quantize)
    model, settings = loaded(load, config.deepspeed.precision, partial(training_settings, config))
    if config.lora is not None:
        add_adapters(model, config.lora)
    if config.gradient_checkpointing:
        network = pretrained(model)
        older = network.gradient_checkpointing_enable  # its name up to transformers 5.20
        # The reentrant method breaks ZeRO-2 and 3 when two forward passes precede a backward pass.
        getattr(network, "activation_checkpointing_enable", older)({"use_reentrant": False})
    optimizer = _optimizer(model, config)
    schedule = LambdaLR(optimizer, partial(schedule_factor, config.optimizer, total_steps))
    # ZeRO's optimizer sums bf16 gradients in fp32, too. At stage 1, DeepSpeed 0.19 would replace it
    # by one without the shards of `distributed.zero`.
    chosen = "zero_optimization" if config.deepspeed.zero_stage else None
    with patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", lambda *_: chosen):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings
        )
    _reduce_lean(engine)
    engine.train()
    warn_of_padding(engine)  # the first look at the model, before training waits for it
    release_freed()  # copies that DeepSpeed has made of the weights
    heartbeat.tick()
    return engine


def _reduce_lean(engine: DeepSpeedEngine) -> None:
    """Reduce the gradients of stage 0 in buckets, and not at all with one rank.

    Written for DeepSpeed 0.19: at stage 0 it copies up to 500 million gradients into one tensor,
    reduces it, and copies the result back, also with one rank. It has no setting for either.
    """
    engine.allreduce_gradients = partial(engine.allreduce_gradients, bucket_size=BUCKET)
    if torch.distributed.get_world_size() == 1:
        engine.allreduce_and_copy = lambda *_, **__: None


def schedule_factor(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """The learning rate after `step` optimizer steps of `total_steps`, as a fraction of its peak.

    The schedules are those of `transformers`, whose module also imports peft.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return step / warmup
    steps = max(1, total_steps - warmup)
    match config.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / steps))
        case "linear":
            return (total_steps - step) / steps
        case "constant":
            return 1.0


def _optimizer(model: nn.Module, config: TrainedModelConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that train.

    It is torch's, except on a GPU whose optimizer states are offloaded to main memory: DeepSpeed
    compiles its own optimizers at their first use, which needs a compiler.
    """
    settings = config.optimizer
    adam: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if config.deepspeed.offload_optimizer and on_gpu():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam = DeepSpeedCPUAdam
    return adam(
        _parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters that train, by their weight decay: norms and biases have none.

    Decay pulls toward zero, which is right for matrices; the scale of a norm rests at one.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [parameter for parameter in trained if len(whole_shape(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(whole_shape(parameter)) < 2]
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": group, "weight_decay": decay} for group, decay in groups if group]
