"""Linear layers with weights in the layout of oneDNN, for generation on a CPU.

Generation multiplies few rows by every weight, for each token again. torch lets the BLAS library
rearrange a weight at every call, which takes longer than the product itself. Here, each weight is
rearranged once for a rollout. The operators are those that torch's compiler uses (torch 2.13).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rlhf_pipeline.models.logprob_head import LogprobHead

DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def repacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Rearrange the weights, for inputs of `rows` rows; the block computes the same as without.

    It needs memory for a second copy of the weights. On a GPU, and for weights that are sharded,
    it has no effect.
    """
    layers = [
        layer for layer in model.modules() if isinstance(layer, nn.Linear) and _is_supported(layer)
    ]
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
            vars(layer)["forward"] = partial(_linear, packed, layer.bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _is_supported(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        type(layer) in (nn.Linear, LogprobHead)
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and weight.dtype in DTYPES
        and torch.backends.mkldnn.is_available()
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output
