"""Joining the ranks, putting a model in a DeepSpeed engine, taking an optimizer step."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf_pipeline.config.training import FrozenModelConfig, Precision, TrainedModelConfig
from rlhf_pipeline.models.loading import enable_checkpointing, freeze
from rlhf_pipeline.models.lora import add_adapters
from rlhf_pipeline.stages import heartbeat
from rlhf_pipeline.training.deepspeed_config import inference_settings, training_settings
from rlhf_pipeline.training.sharding import sharded_loading

M = TypeVar("M", bound=nn.Module)
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


@dataclass(frozen=True)
class World:
    """The ranks that train together, and this one among them."""

    rank: int
    size: int
    device: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over all ranks; the argument stays as it is."""
        total = tensor.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def sums(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Additive scalars summed over all ranks, in one collective."""
        total = self.sum(torch.stack([value.detach().double() for value in values.values()]))
        return dict(zip(values, total.tolist(), strict=True))

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank; all ranks get the same answer."""
        return bool(self.sum(torch.tensor(float(condition), device=self.device)) > 0)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        torch.distributed.barrier()


def join(seed: int, *, timeout_s: float) -> World:
    """Join the other ranks of this launch; the same seed on all, so that equal models are initialised equally."""
    # The shared-memory op serves tensor-parallel inference only, needs a compiler, and leaves 69 MB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ["MASTER_ADDR"] == LOOPBACK and not torch.distributed.is_initialized():
        _meet_on_loopback(timedelta(seconds=timeout_s))
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s), verbose=False)
    atexit.register(_leave)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(seed)
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def _meet_on_loopback(timeout: timedelta) -> None:
    """Where all ranks are on this machine, nobody else can reach them: torch's own store listens on every interface, and
    does what anybody tells it.
    """
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = None
    if rank == 0:
        listener = socket.create_server((LOOPBACK, port), backlog=size).detach()
    store = torch.distributed.TCPStore(LOOPBACK, port, size, rank == 0, timeout, master_listen_fd=listener)
    if LOOPBACK_INTERFACE in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # else that which the machine's name leads to
    backend = get_accelerator().communication_backend_name()
    torch.distributed.init_process_group(backend, timeout=timeout, world_size=size, rank=rank, store=store)


def _leave() -> None:
    """Close the connections while the interpreter still lives: their threads may abort a process that ends before them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train_engine(load: Callable[..., nn.Module], config: TrainedModelConfig, total_steps: int) -> DeepSpeedEngine:
    """A model with AdamW and its learning-rate schedule over `total_steps`, in a DeepSpeed engine.

    Args:
        load: reads the model in a precision; its weights are sharded as they are read where the block says ZeRO-3. Takes
            `quantize`, too, where the block says so.
        config: the model's block.
        total_steps: optimizer steps until the schedule ends.
    """
    if config.lora is not None and config.lora.quantize is not None:
        load = partial(load, quantize=config.lora.quantize)
    model, settings = _loaded(load, config.deepspeed.precision, partial(training_settings, config))
    if config.lora is not None:
        add_adapters(model, config.lora)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    optimizer = _optimizer(model, config)
    schedule = get_scheduler(
        "constant_with_warmup" if config.optimizer.schedule == "constant" else config.optimizer.schedule,
        optimizer,
        num_warmup_steps=round(config.optimizer.warmup_fraction * total_steps),
        num_training_steps=total_steps,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    engine.train()
    heartbeat.tick()
    return engine


def frozen_model(
    load: Callable[[Precision], M], config: FrozenModelConfig, accompanied: TrainedModelConfig | None, world: World
) -> M | DeepSpeedEngine:
    """A model for inference: itself, whole on every rank, at ZeRO stage 0; an engine that shards its weights at stage 3.

    Args:
        load: reads the model.
        config: the model's block.
        accompanied: block of the model in training that it goes with, whose stage may decide.
        world: where the model goes.
    """
    precision = config.deepspeed.precision
    if config.zero_stage(accompanied) == 0:
        return freeze(load(precision)).to(world.device)
    model, settings = _loaded(load, precision, partial(inference_settings, config.deepspeed))
    engine, *_ = deepspeed.initialize(model=freeze(model), config=settings)
    engine.eval()
    return engine


def _loaded(
    load: Callable[[Precision], M], precision: Precision, settings: Callable[..., dict[str, Any]]
) -> tuple[M, dict[str, Any]]:
    """The model, and DeepSpeed's settings for its width, which is known once it is loaded."""
    on_gpu = torch.cuda.is_available()
    with sharded_loading(settings(hidden_size=0, on_gpu=on_gpu)):
        model = load(precision)
    heartbeat.tick()
    return model, settings(hidden_size=cast(Any, model.config).hidden_size, on_gpu=on_gpu)


def _optimizer(model: nn.Module, config: TrainedModelConfig) -> torch.optim.Optimizer:
    """AdamW over what trains: torch's, except on a GPU whose optimizer states lie in main memory.

    DeepSpeed's own optimizers are compiled at their first use, so a machine needs a compiler for them.
    """
    settings = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    if config.deepspeed.offload_optimizer and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam = DeepSpeedCPUAdam
    return adam(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def optimizer_step(engine: DeepSpeedEngine, world: World, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Accumulate the gradient of the summed losses, one micro batch's each, and take one optimizer step.

    Each loss is a sum divided by the *global* count of the step, so the gradient is that of the whole batch however it is
    cut into micro batches and ranks. DeepSpeed averages over ranks; the factor undoes that. A loss is computed when its
    turn comes, so the activations of one micro batch are in memory at a time.
    """
    accumulate(engine, world, losses)
    engine.step()


def accumulate(engine: DeepSpeedEngine, world: World, losses: Sequence[Callable[[], Tensor]]) -> None:
    """The gradient of `optimizer_step`, without the step."""
    for number, loss in enumerate(losses, start=1):
        engine.set_gradient_accumulation_boundary(number == len(losses))
        engine.backward(loss() * world.size)
        heartbeat.tick()


def step_together(engines: Sequence[DeepSpeedEngine]) -> None:
    """The optimizer steps of fp16 engines whose gradients are accumulated: all, or none where the gradients of any overflow.

    By itself DeepSpeed leaves out the step and the schedule of the one engine whose gradients overflow, and lowers its loss
    scale. Here the others are told that theirs do, too; but their loss scale is right, and stays.
    """
    overflows = [engine.optimizer.has_overflow() for engine in engines]  # agreed on by all ranks
    for engine, own in zip(engines, overflows, strict=True):
        optimizer = engine.optimizer
        before = dict(vars(optimizer.loss_scaler))
        optimizer.has_overflow = lambda *_, **__: any(overflows)  # step() asks again, and clears up
        engine.step()
        del optimizer.has_overflow
        if any(overflows) and not own:
            vars(optimizer.loss_scaler).update(before)


def fp16_metrics(engine: DeepSpeedEngine) -> dict[str, float]:
    """In fp16, the loss scale and how many steps have been left out to find it; nothing in other precisions."""
    if not engine.fp16_enabled():
        return {}
    return {"loss_scale": float(engine.optimizer.loss_scale), "skipped_steps": float(engine.skipped_steps)}


def skip_optimizer_steps(engine: DeepSpeedEngine, count: int) -> None:
    """Move the learning rate on as if `count` optimizer steps had been taken: its schedule still ends with the last step."""
    for _ in range(count):
        engine.lr_scheduler.step()


def grad_norm(engine: deepspeed.DeepSpeedEngine) -> Tensor | float | None:
    """Gradient norm of the newest optimizer step, before clipping: the same on all ranks, and read without waiting.

    Infinite from the first step on that DeepSpeed left out because a gradient was not finite: the weights are as they
    were, and nothing else tells of it. In fp16 such a step is no fault but how the loss scale is found; its norm is None.
    None, too, where DeepSpeed reports no norm: at stage 0.
    """
    if engine.fp16_enabled():
        return engine.get_global_grad_norm() if engine.was_step_applied() else None
    return math.inf if engine.skipped_steps else engine.get_global_grad_norm()
