"""One optimizer step of a DeepSpeed engine, for any number of micro batches and ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine
from rlhf_pipeline.runtime import heartbeat

Sums = dict[str, Tensor]
"""Additive sums over micro batches, from which metrics are made: scalars by name."""

Loss = Callable[[], tuple[Tensor, Sums]]
"""Computes the loss of one micro batch and its sums."""


def optimizer_step(
    engine: DeepSpeedEngine, world: World, losses: Sequence[Loss], sums: Sums | None = None
) -> Sums:
    """Accumulate the gradient of all losses and take one optimizer step; return the sums.

    Each loss is a sum divided by the *global* count of the step, so the gradient is that of the
    whole batch, however it is divided into micro batches and ranks. DeepSpeed averages over ranks;
    the factor `world.size` undoes that. Each loss is computed in its turn, so memory holds the
    activations of one micro batch at a time. The argument `sums` is added to, but not changed.
    """
    sums = sums or {}
    with _adding_in_order(world.deterministic):
        for number, compute in enumerate(losses, start=1):
            engine.set_gradient_accumulation_boundary(number == len(losses))
            loss, own = compute()
            sums = add_sums(sums, own)
            del own  # its graphs, for example that of the entropy, are not part of the loss
            engine.backward(loss * world.size)
            del loss
            heartbeat.report_progress()
    engine.step()
    return sums


@contextmanager
def _adding_in_order(on: bool) -> Iterator[None]:
    """Let kernels of a GPU add in a fixed order, such as the backward pass of attention.

    Only here: sampling needs a cumulative sum, which torch refuses in this mode.
    """
    torch.use_deterministic_algorithms(on)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # nothing reads it, and to fill it takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def add_sums(sums: Sums, other: Sums) -> Sums:
    """The sums of both, in float64, without gradient."""
    added = {name: sums.get(name, 0) + value.detach().double() for name, value in other.items()}
    return sums | added


def grad_norm(engine: DeepSpeedEngine) -> Tensor | None:
    """Gradient norm of the newest optimizer step before clipping, equal on all ranks.

    It is 0-dim on the engine's device, so the host can read it together with other numbers. It is
    infinite once DeepSpeed has skipped a step because a gradient was not finite: such a step leaves
    the weights unchanged and shows nowhere else. It is None if DeepSpeed reports none: at stage 0.
    """
    norm = math.inf if engine.skipped_steps else engine.get_global_grad_norm()
    if norm is None:
        return None
    if isinstance(norm, Tensor):  # in main memory if the optimizer is there
        return norm.to(engine.device, non_blocking=True)
    return torch.full((), norm, dtype=torch.float64, device=engine.device)
