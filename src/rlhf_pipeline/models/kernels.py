"""Fused kernels around attention, in a loaded model: its weights keep their names."""

import copy
import sys
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.config.block import Kernels, Precision
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.lean_transformers import AttentionInterface, PreTrainedModel
from rlhf_pipeline.models.loading import DTYPES, without_dropout
from rlhf_pipeline.models.packing import PACKED, packed_attention
from rlhf_pipeline.models.self_check import SUMMED, Comparison, refuse_errors
from rlhf_pipeline.models.sequences import collate

TEXT = [i * i % 61 + 2 for i in range(2000)]
ROWS = collate([TEXT, TEXT, TEXT], [TEXT[:29], TEXT[:300], TEXT[:77]], 0, prompt_numbers=[0, 1, 1])
"""4,406 tokens: from 32,768 vectors on, as 8 heads of them have, Liger has another norm."""


def use_kernels(
    model: nn.Module, kernels: Kernels | None, precision: Precision, device: torch.device
) -> None:
    """Give a model or an engine fused kernels. None: it keeps torch's operators.

    Raises ConfigError if its family has no such kernels, StageError if Liger's results differ.
    """
    if kernels is None:
        return
    network = network_of(model)
    layers = [part for part in network.modules() if isinstance(part, GradientCheckpointingLayer)]
    family, known = network.config.model_type, bool(layers)
    if kernels == "liger":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        known = family in MODEL_TYPE_TO_APPLY_LIGER_FN
    if not known:
        raise ConfigError(
            f"deepspeed.kernels: found {kernels} for a model of type {family}, expected a family "
            "that it knows. Fix: set it to null, for a frozen model that of its companion, too"
        )
    if kernels == "liger":
        found = compare_liger(network, DTYPES[precision], device)
        refuse_errors(found, precision, device, "set deepspeed.kernels to null")
        return _apply_liger(network)
    # Inside a graph, the lengths of packed rows would make each micro batch another graph.
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    torch._dynamo.config.recompile_limit = 64  # models, with and without gradients and adapters
    for layer in layers:
        layer.compile(dynamic=True)


def compare_liger(
    network: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> list[Comparison]:
    """Two layers of this width: hidden states, and gradients of random weights.

    Errors are relative root mean squares beside torch in float32; torch in `dtype` has the bound.
    """
    config = copy.deepcopy(network.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 2, 64, 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    rows = ROWS.to(device)
    packs = config._attn_implementation == PACKED
    inputs = rows.packed().model_inputs() if packs else rows.model_inputs()

    @torch.enable_grad()
    def results() -> list[Tensor]:
        hidden = small.base_model(**inputs, use_cache=False)[0]
        scale = torch.arange(hidden.numel(), device=device).view(hidden.shape).sin().to(hidden)
        weights = list(small.base_model.parameters())
        found = (hidden, *torch.autograd.grad(hidden, weights, scale, allow_unused=True))
        return [x.detach().float() for x in found if x is not None]

    modeling = type(network).__module__
    with patch.dict(vars(sys.modules[modeling]), _plain(modeling)):
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(1)
            small = without_dropout(type(network)(config))
        exact = results()
        for weight in small.parameters():  # not buffers: rotary frequencies are in float32
            weight.data = weight.data.to(dtype)
        rounded = results()
        _apply_liger(small)
        found = results()
    compared, kernel = [], f"Liger in a {config.model_type}"
    for own, other, best in zip(found, rounded, exact, strict=True):
        error, bound = (float((x - best).norm() / best.norm()) for x in (own, other))
        bound = 2 * bound + SUMMED * torch.finfo(torch.float32).eps
        compared.append(Comparison(kernel, error, bound))
    return compared


@cache
def _plain(modeling: str) -> dict[str, Any]:
    """What the names in the module of a family mean before Liger has changed them."""
    return dict(vars(sys.modules[modeling]))


def _apply_liger(network: PreTrainedModel) -> None:
    """Patch norms and MLPs of this model, and the family's function for rotary embeddings."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply

    plain = _plain(modeling := type(network).__module__)
    # Log-probabilities have a head of their own (`models.forward`).
    apply(model=network, cross_entropy=False, fused_linear_cross_entropy=False)
    # It also replaces the family's classes, and later models would lose the biases of their MLPs.
    classes = {name: x for name, x in plain.items() if isinstance(x, type)}
    vars(sys.modules[modeling]).update(classes)
