"""The one place that knows DeepSpeed: joining the ranks, wrapping a model for training, taking an optimizer step."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.errors import StageError


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

    def barrier(self) -> None:
        """Wait until every rank is here."""
        torch.distributed.barrier()


def join(seed: int, *, timeout_s: float) -> World:
    """Join the other ranks of this launch; the same seed on all, so that equal models are initialised equally."""
    # The shared-memory op serves tensor-parallel inference only, needs a compiler, and leaves 69 MB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s), verbose=False)
    atexit.register(_leave)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(seed)
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def _leave() -> None:
    """Close the connections while the interpreter still lives: their threads may abort a process that ends before them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train_engine(model: nn.Module, config: TrainedModelConfig, total_steps: int) -> deepspeed.DeepSpeedEngine:
    """The model with AdamW and its learning-rate schedule over `total_steps`, in a DeepSpeed engine."""
    settings = config.optimizer
    # torch's AdamW: DeepSpeed's own need a compiler at run time.
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = get_scheduler(
        "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        optimizer,
        num_warmup_steps=round(settings.warmup_fraction * total_steps),
        num_training_steps=total_steps,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=deepspeed_config(config)
    )
    return engine


def deepspeed_config(config: TrainedModelConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration of one trained model.

    Defaults that changed between releases, or that act on the whole process, are written out. DeepSpeed's batch sizes
    stay at 1: gradients are accumulated over as many micro batches as a step happens to have, see `optimizer_step`.
    """
    precision = config.deepspeed.precision
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": {
            "stage": config.deepspeed.zero_stage,
            "overlap_comm": False,
            "memory_efficient_linear": False,  # would replace torch's linear function in the whole process
        },
    }


def optimizer_step(engine: deepspeed.DeepSpeedEngine, world: World, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Accumulate the gradient of the summed losses, one micro batch's each, and take one optimizer step.

    Each loss is a sum divided by the *global* count of the step, so the gradient is that of the whole batch however it is
    cut into micro batches and ranks. DeepSpeed averages over ranks; the factor undoes that. A loss is computed when its
    turn comes, so the activations of one micro batch are in memory at a time.
    """
    for number, loss in enumerate(losses, start=1):
        engine.set_gradient_accumulation_boundary(number == len(losses))
        engine.backward(loss() * world.size)
    engine.step()


def skip_optimizer_steps(engine: deepspeed.DeepSpeedEngine, count: int) -> None:
    """Move the learning rate on as if `count` optimizer steps had been taken: its schedule still ends with the last step."""
    for _ in range(count):
        engine.lr_scheduler.step()


def require_finite(metrics: dict[str, float], step: int) -> None:
    """Raise `StageError` that names the first metric that is not a finite number."""
    for name, value in metrics.items():
        if not torch.isfinite(torch.tensor(value)):
            raise StageError(
                f"{name} is {value} at step {step}: training has diverged; lower the learning rate, or look at the rows "
                "of this step"
            )
