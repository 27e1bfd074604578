"""Fused kernels around attention, in a loaded model: its weights keep their names."""

import sys

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.config.block import Kernels, Precision
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.models.forward import network_of, outputs
from rlhf_pipeline.models.lean_transformers import AttentionInterface
from rlhf_pipeline.models.loading import DTYPES
from rlhf_pipeline.models.packing import PACKED, packed_attention
from rlhf_pipeline.models.self_check import SUMMED, Comparison, refuse_errors

ROUNDINGS = 16
"""Units of its precision that outputs may differ by, as a relative root mean square: two ways of
rounding in bf16 differ by two or three units behind 32 layers."""


@torch.no_grad()
def use_kernels(
    model: nn.Module, kernels: Kernels | None, precision: Precision, device: torch.device
) -> None:
    """Give a model or an engine fused kernels. None: it keeps torch's operators.

    All ranks call this together. Raises ConfigError if the model's family has no such kernels, and
    StageError if the model has other outputs with Liger's.
    """
    if kernels is None:
        return
    network = network_of(model)
    layers = [part for part in network.modules() if isinstance(part, GradientCheckpointingLayer)]
    family, known = network.config.model_type, bool(layers)
    if kernels == "liger":
        from liger_kernel.transformers import monkey_patch as liger

        known = family in liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    if not known:
        raise ConfigError(
            f"deepspeed.kernels: found {kernels} for a model of type {family}, expected a family "
            "that it knows. Fix: set it to null, for a frozen model that of its companion, too"
        )
    if kernels == "compile":
        # Inside a graph, the lengths of packed rows would make each micro batch another graph.
        AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
        torch._dynamo.config.recompile_limit = 64  # models, with and without gradients, adapters
        for layer in layers:
            layer.compile(dynamic=True)
        return
    ids = torch.arange(1, 65, device=device)[None]
    named = vars(sys.modules[type(network).__module__])
    classes = {name: each for name, each in named.items() if isinstance(each, type)}
    plain = outputs(model, network, input_ids=ids)
    # Log-probabilities have a head of their own (`models.forward`).
    own = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model=network, **own)
    named.update(classes)  # Liger replaces them, and later models would lose the biases of MLPs
    error = (outputs(model, network, input_ids=ids) - plain).norm() / plain.norm()
    bound = ROUNDINGS * torch.finfo(DTYPES[precision]).eps + SUMMED * torch.finfo(torch.float32).eps
    found = Comparison(f"Liger in a {family}", float(error), bound)
    refuse_errors([found], precision, device, "set deepspeed.kernels to null")
