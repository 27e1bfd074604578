"""One optimizer step of a DeepSpeed engine, whatever the number of micro batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deepspeed import DeepSpeedEngine
from torch import Tensor

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.runtime import heartbeat


def optimizer_step(
    engine: DeepSpeedEngine, world: World, losses: Sequence[Callable[[], Tensor]]
) -> None:
    """Accumulate the gradient of the summed losses, one micro batch's each, and take one optimizer step.

    Each loss is a sum divided by the *global* count of the step, so the gradient is that of the whole batch however it is
    cut into micro batches and ranks. DeepSpeed averages over ranks; the factor undoes that. A loss is computed when its
    turn comes, so the activations of one micro batch are in memory at a time.
    """
    accumulate(engine, world, losses)
    engine.step()


def accumulate(
    engine: DeepSpeedEngine, world: World, losses: Sequence[Callable[[], Tensor]]
) -> None:
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
    return {
        "loss_scale": float(engine.optimizer.loss_scale),
        "skipped_steps": float(engine.skipped_steps),
    }


def skip_optimizer_steps(engine: DeepSpeedEngine, count: int) -> None:
    """Move the learning rate on as if `count` optimizer steps had been taken: its schedule still ends with the last step."""
    for _ in range(count):
        engine.lr_scheduler.step()


def grad_norm(engine: DeepSpeedEngine) -> Tensor | float | None:
    """Gradient norm of the newest optimizer step, before clipping: the same on all ranks, and read without waiting.

    Infinite from the first step on that DeepSpeed left out because a gradient was not finite: the weights are as they
    were, and nothing else tells of it. In fp16 such a step is no fault but how the loss scale is found; its norm is None.
    None, too, where DeepSpeed reports no norm: at stage 0.
    """
    if engine.fp16_enabled():
        return engine.get_global_grad_norm() if engine.was_step_applied() else None
    return math.inf if engine.skipped_steps else engine.get_global_grad_norm()
