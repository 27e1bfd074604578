"""The optimizer step of ZeRO 1 and 2 for a single rank on a CPU, which reads each gradient once.

DeepSpeed copies gradients into buckets, reduces them, flattens them, converts them, scales them and
then updates: each is a pass over main memory, which is what limits a CPU. A single rank has nothing
to reduce. So its gradients stay where the backward pass wrote them, one pass computes their norm,
and one pass over small pieces, which stay in the cache, does the rest.

Written for DeepSpeed 0.19 and torch's fused AdamW.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.distributed.engine_state import start_optimizer
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, fp32_shards, pieces
from rlhf_pipeline.runtime import heartbeat

SIZE = 2**18
"""Numbers of a piece. The five float32 arrays of an update of it take 5 MiB."""


class LeanStep:
    """Takes the place of what the engine and its optimizer do after the backward pass."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._adam: torch.optim.AdamW = self._zero.optimizer
        self._parameters: dict[str, Any] = dict(engine.module.named_parameters())
        engine.allreduce_gradients = lambda *_, **__: None
        self._zero.process_gradients = self._keep
        self._zero.backward_epilogue = lambda: None
        self._zero.step = self.step

    def _keep(self, parameter: Any, group: int) -> None:
        """Add the gradient of a micro batch to those before, in the precision of `accumulate`.

        The only one of a step, which is the usual case, stays as it is.
        """
        is_only = self._zero.is_gradient_accumulation_boundary() and parameter.grad_accum is None
        if not is_only and self._zero.use_separate_grad_accum:
            self._zero._fill_param_grad_accum_attribute(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, update the float32 weights, and round them to the model's own."""
        found = {name: _gradient(own) for name, own in self._parameters.items()}
        gradients = [gradient for gradient in found.values() if gradient is not None]
        norm = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
        is_finite, limit = math.isfinite(norm), self._zero.clip_grad
        self._zero.overflow, self._zero._global_grad_norm = not is_finite, norm
        if is_finite:
            # DeepSpeed's formula: at most 1, and no division by zero.
            self._update(found, min(1.0, limit / (float(norm) + 1e-6)) if limit else 1.0)
        self._zero.zero_grad(set_to_none=True)

    def _update(self, gradients: dict[str, Tensor | None], scale: float) -> None:
        """One step of AdamW by gradients that still have to be multiplied by `scale`."""
        shards, adam = fp32_shards(self._engine), self._adam
        if not adam.state:
            start_optimizer(self._engine, 0)
        states = [adam.state[shard] for shard in shards]
        settings: dict[int, dict[str, Any]] = {}
        for parameters, group, state in zip(
            self._zero.round_robin_bit16_groups, adam.param_groups, states, strict=True
        ):
            state["step"] += 1
            own = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            own |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            settings |= dict.fromkeys(map(id, parameters), own | {"state_steps": [state["step"]]})
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        views = (pieces(self._engine, each) for each in (shards, means, squares))
        for (name, _, weights), (*_, mean), (*_, square) in zip(*views, strict=True):
            heartbeat.report_progress()
            parameter, gradient = self._parameters[name], gradients[name]
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            arrays = (weights, mean, square, gradient.view(-1), parameter.detach().view(-1))
            for exact, first, second, part, rounded in zip(
                *(array.detach().split(SIZE) for array in arrays), strict=True
            ):
                scaled = part.float() * scale
                torch._fused_adamw_(
                    [exact], [scaled], [first], [second], [],
                    **settings[id(parameter)], amsgrad=False, maximize=False,
                )  # fmt: skip
                rounded.copy_(exact)


def _gradient(parameter: Any) -> Tensor | None:
    """The gradient of all micro batches of a step; None if none reached the parameter."""
    accumulated: Tensor | None = getattr(parameter, "grad_accum", None)
    return parameter.grad if accumulated is None else accumulated
