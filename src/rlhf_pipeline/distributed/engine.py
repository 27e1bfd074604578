"""Loading models: into a DeepSpeed engine that trains them, or frozen as they are used.

DeepSpeed's options that change numbers, act on the whole process, or had other defaults in earlier
releases are set explicitly: a new release cannot change them, and what is stored with an artifact
is complete.
"""

import ctypes
import gc
import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_pipeline.config.block import Kernels, Precision
from rlhf_pipeline.config.training import (
    BUCKET,
    LIVE,
    DeepSpeedConfig,
    FrozenDeepSpeedConfig,
    OptimizerConfig,
    TrainedModelConfig,
)
from rlhf_pipeline.distributed.lean_step import LeanStep
from rlhf_pipeline.distributed.world import World, on_gpu, own_device
from rlhf_pipeline.distributed.zero import (
    DeepSpeedEngine,
    deepspeed,
    gathered,
    get_accelerator,
    sharded_loading,
    whole_shape,
)
from rlhf_pipeline.models.forward import network_of, warn_of_padding
from rlhf_pipeline.models.loading import freeze
from rlhf_pipeline.models.scalar_head import TokenScores, load_scores
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.job import LaunchedJob

FIXED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The DeepSpeed settings that every engine has."""

M = TypeVar("M", bound=nn.Module)


def train_engine(
    load: Callable[..., nn.Module], config: TrainedModelConfig, total_steps: int
) -> DeepSpeedEngine:
    """Load a model into a DeepSpeed engine with AdamW and a learning-rate schedule.

    `load` loads the model in a given precision. At ZeRO stage 3, the weights are sharded while they
    are read; at the other stages, `load` also gets the argument `device`, so that the ranks of a
    machine never hold a copy each in its main memory. With `lora.quantize`, it also gets
    `quantize`. The schedule ends after `total_steps` optimizer steps.
    """
    if config.lora is not None and config.lora.quantize is not None:
        load = partial(load, quantize=config.lora.quantize)
    model, settings = loaded(load, config.deepspeed.precision, partial(training_settings, config))
    if config.lora is not None:
        from rlhf_pipeline.models.lora import add_adapters

        add_adapters(model, config.lora)
    if config.gradient_checkpointing:
        network = network_of(model)
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
    # At stage 0, DeepSpeed 0.19 copies up to 500 million gradients into one tensor, reduces it, and
    # copies the result back, also with one rank. It has no setting for either.
    engine.allreduce_gradients = partial(engine.allreduce_gradients, bucket_size=BUCKET)
    if torch.distributed.get_world_size() == 1:
        engine.allreduce_and_copy = lambda *_, **__: None
        offloads, stage = engine.zero_use_cpu_optimizer(), config.deepspeed.zero_stage
        if stage in (1, 2) and engine.device.type == "cpu" and not offloads:
            LeanStep(engine)
    engine.train()
    warn_of_padding(engine)  # the first look at the model, before training waits for it
    _fuse(engine, config.deepspeed.kernels, config.deepspeed.precision, own_device())
    release_freed()  # copies that DeepSpeed has made of the weights
    heartbeat.report_progress()
    return engine


def untrained(sft_model: Path, precision: Precision, **how: Any) -> TokenScores:
    """The SFT model with a new scalar head; all ranks draw the same one. See `load_scores`.

    Its standard deviation is 1 / sqrt(d + 1) for width d (Huang et al., 2024, arXiv 2403.17031):
    a head of zeros would at first give the other weights no gradient.
    """
    model = load_scores(sft_model, precision, new_head=True, **how)
    with gathered(model.head.parameters()):
        nn.init.normal_(model.head.weight, std=(model.head.in_features + 1) ** -0.5)
    return model


def training_settings(
    config: TrainedModelConfig, *, hidden_size: int, on_gpu: bool
) -> dict[str, Any]:
    """DeepSpeed settings for a trainable model.

    Its batch sizes stay at 1, because `optimizer_step` decides how many micro batches a step has.
    """
    deepspeed = config.deepspeed
    settings = inference_settings(deepspeed, hidden_size=hidden_size, on_gpu=on_gpu)
    settings["gradient_clipping"] = config.optimizer.max_grad_norm
    if deepspeed.precision == "bf16":
        settings["data_types"]["grad_accum_dtype"] = deepspeed.accumulate
    if deepspeed.offload_optimizer:
        memory = {"device": "cpu", "pin_memory": on_gpu}
        settings["zero_optimization"]["offload_optimizer"] = memory
        # Without a GPU, torch's AdamW is already on the CPU.
        settings["zero_force_ds_cpu_optimizer"] = on_gpu
    return settings


def inference_settings(
    config: FrozenDeepSpeedConfig | DeepSpeedConfig, *, hidden_size: int, on_gpu: bool
) -> dict[str, Any]:
    """DeepSpeed settings for a model that is not trained; see `training_settings`."""
    precision, memory = config.precision, {"device": "cpu", "pin_memory": on_gpu}
    return FIXED | {
        "data_types": {"grad_accum_dtype": None, **FIXED["data_types"]},  # that of the weights
        "bf16": {"enabled": precision == "bf16", **FIXED["bf16"]},
        "zero_optimization": {
            "stage": config.zero_stage,
            # Below stage 3 it lost gradients until 2026: DeepSpeed's 5606, 7371, 7805, 7965, 8061.
            "overlap_comm": config.zero_stage == 3,
            **FIXED["zero_optimization"],
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            # Biases and norms stay whole, matrices are sharded.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
            **({"offload_param": memory} if config.offload_parameters else {}),
        },
    }


def store_settings(models: Mapping[str, nn.Module], job: LaunchedJob) -> None:
    """Write the settings of the engines among the models, for the manifest of the artifact."""
    if os.environ["RANK"] == "0":
        found = {
            n: model.config for n, model in models.items() if isinstance(model, DeepSpeedEngine)
        }
        job.deepspeed_file.write_text(json.dumps(found, indent=2))


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
    groups = _parameter_groups(model, settings.weight_decay)
    how: Any = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if config.deepspeed.offload_optimizer and on_gpu():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **how)
    return torch.optim.AdamW(groups, fused=True, **how)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters that train, by their weight decay: norms and biases have none.

    Decay pulls toward zero, which is right for matrices; the scale of a norm rests at one.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = weight_decay if len(whole_shape(parameter)) >= 2 else 0.0
            groups.setdefault(decay, []).append(parameter)
    return [{"params": groups[decay], "weight_decay": decay} for decay in sorted(groups)[::-1]]


def frozen_model(
    load: Callable[..., M], config: FrozenDeepSpeedConfig, world: World
) -> M | DeepSpeedEngine:
    """Load a model: at ZeRO stage 0, whole on every rank; at stage 3, an engine that shards it.

    `load` is that of `train_engine`; `config` contains stage and precision, see
    `FrozenModelConfig.beside`.
    """
    precision = config.precision
    assert precision is not None and config.zero_stage is not None
    found: M | DeepSpeedEngine
    if config.zero_stage == 0:
        _check_gpu(world.device, precision)
        found = freeze(load(precision, **_placement(world.device))).to(world.device)
    else:
        model, settings = loaded(load, precision, partial(inference_settings, config))
        found, *_ = deepspeed.initialize(model=freeze(model), config=settings)
        found.eval()
    warn_of_padding(found)
    _fuse(found, config.kernels, precision, world.device)
    return found


def loaded(
    load: Callable[..., M], precision: Precision, settings: Callable[..., dict[str, Any]]
) -> tuple[M, dict[str, Any]]:
    """The model, and the DeepSpeed settings for its width, which is known only after loading."""
    _check_gpu(own_device(), precision)
    before = settings(hidden_size=0, on_gpu=on_gpu())
    is_sharded = before["zero_optimization"]["stage"] == 3
    with sharded_loading(before):
        model = load(precision, **({} if is_sharded else _placement(own_device())))
    _exact_frequencies(model)
    release_freed()  # weights that were whole until they were sharded
    heartbeat.report_progress()
    return model, settings(hidden_size=cast(Any, model.config).hidden_size, on_gpu=on_gpu())


# Models on a CPU with torch's own operators, the default, need no part of `models.kernels`.


def _placement(device: torch.device) -> dict[str, torch.device]:
    """The argument that makes `load` read weights onto a GPU, never whole into main memory."""
    return {"device": device} if device.type == "cuda" else {}


def _check_gpu(device: torch.device, precision: Precision) -> None:
    if device.type == "cuda":
        from rlhf_pipeline.models.kernels import require_sound_kernels

        if precision == "fp32":  # in TF32, which tensor cores have
            torch.set_float32_matmul_precision("high")
        require_sound_kernels(device, precision)


def _fuse(
    model: nn.Module, kernels: Kernels | None, precision: Precision, device: torch.device
) -> None:
    if kernels is not None:
        from rlhf_pipeline.models.kernels import use_kernels

        use_kernels(model, kernels, precision, device)


def _exact_frequencies(model: nn.Module) -> None:
    """Compute rotary frequencies in float32.

    Under DeepSpeed's `zero.Init`, transformers up to 5.20 rounds them to the precision of the
    weights. Whoever loads the export would compute other logits than training did.
    """
    for module in model.modules():
        rounded = getattr(module, "inv_freq", None)
        if rounded is not None and rounded.dtype != torch.float32:
            for name, exact in type(module)(module.config).named_buffers():
                module.register_buffer(name, exact.to(rounded.device), persistent=False)


def free_memory() -> None:
    """Give back the memory of models that nothing refers to."""
    gc.collect()
    get_accelerator().empty_cache()


def release_freed() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed blocks below 32 MiB for later ones. Loading a model, or sampling with a second
    copy of its weights, leaves hundreds of MiB there, and the tensors of training do not fit the
    gaps. The call takes milliseconds. It has no effect without glibc.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
