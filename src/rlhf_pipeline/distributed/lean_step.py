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
from torch import Tensor, nn

from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import pieces
from rlhf_pipeline.runtime import heartbeat

SIZE = 2**18
"""Numbers of a piece. The five float32 arrays of an update of it take 5 MiB."""


class LeanStep:
    """Takes the place of what the engine and its optimizer do after the backward pass."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._zero = engine.optimizer
        self._adam: torch.optim.AdamW = self._zero.optimizer
        parameters = dict(engine.module.named_parameters())
        self._groups = [
            [(parameters[piece.name], piece.offset) for piece in own] for own in pieces(engine)
        ]
        self._limit: float = self._zero.clip_grad
        engine.allreduce_gradients = lambda *_, **__: None
        self._zero.process_gradients = self._keep
        self._zero.backward_epilogue = lambda: None
        self._zero.step = self.step

    def _keep(self, parameter: nn.Parameter, group: int) -> None:
        """Add the gradient of a micro batch to those before, in `accumulate`'s precision.

        The only one of a step, which is the usual case, stays as it is.
        """
        is_only = self._zero.is_gradient_accumulation_boundary() and parameter.grad_accum is None
        if not is_only and self._zero.use_separate_grad_accum:
            self._zero._fill_param_grad_accum_attribute(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, update the float32 weights, and round them to the model's own."""
        found = [[(_gradient(p), p, offset) for p, offset in own] for own in self._groups]
        gradients = [gradient for own in found for gradient, *_ in own if gradient is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self._zero._global_grad_norm, self._zero.overflow = norm, not math.isfinite(norm)
        if self._zero.overflow:
            self._zero._global_grad_norm = math.inf
        else:
            # DeepSpeed's formula: at most 1, and no division by zero.
            scale = min(1.0, self._limit / (float(norm) + 1e-6)) if self._limit else 1.0
            for group, flat, own in zip(
                self._adam.param_groups, self._zero.single_partition_of_fp32_groups, found,
                strict=True,
            ):  # fmt: skip
                self._update(group, flat, own, scale)
        self._zero.zero_grad(set_to_none=True)

    def _update(
        self,
        group: dict[str, Any],
        flat: Tensor,
        gradients: list[tuple[Tensor | None, nn.Parameter, int]],
        scale: float,
    ) -> None:
        """One step of AdamW for the flat weights of a group."""
        state: dict[str, Tensor] = self._adam.state[flat]
        if not state:  # as torch's own first step
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        state["step"] += 1
        arrays = flat.detach(), state["exp_avg"], state["exp_avg_sq"]
        settings: dict[str, Any] = {
            "lr": group["lr"], "beta1": group["betas"][0], "beta2": group["betas"][1],
            "weight_decay": group["weight_decay"], "eps": group["eps"],
            "amsgrad": False, "maximize": False,
        }  # fmt: skip
        for gradient, parameter, offset in gradients:
            heartbeat.tick()
            own = slice(offset, offset + parameter.numel())
            parts = [array[own].split(SIZE) for array in arrays]
            rounded = parameter.detach().view(-1).split(SIZE)
            whole = [None] * len(rounded) if gradient is None else gradient.view(-1).split(SIZE)
            for weights, mean, square, low, part in zip(*parts, rounded, whole, strict=True):
                exact = torch.zeros_like(weights) if part is None else part.float()
                if scale != 1:
                    exact = exact * scale
                torch._fused_adamw_(
                    [weights], [exact], [mean], [square], [], [state["step"]], **settings
                )
                low.copy_(weights)


def _gradient(parameter: Any) -> Tensor | None:
    """The gradient of all micro batches of a step; None if none reached the parameter."""
    accumulated: Tensor | None = parameter.grad_accum
    return parameter.grad if accumulated is None else accumulated
