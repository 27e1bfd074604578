"""Fused kernels, and the kernels of a GPU beside a CPU in float32.

A GPU runs kernels that a CPU never runs, and a wrong gradient would train without an error. So a
GPU computes examples of attention, log-probabilities and sampling before it loads its first model.
Fused kernels around attention come into a loaded model, whose weights keep their names.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.config.block import Kernels, Precision
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.models import AttentionInterface, packing
from rlhf_pipeline.models.forward import network_of, outputs
from rlhf_pipeline.models.loading import DTYPES
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl import logprobs

ROWS = collate(
    [[1], [2] * 100, [3] * 400, [3] * 400], [[], [4] * 29, [4] * 300, [4] * 77], 0,
    prompt_numbers=[0, 1, 2, 2],
)  # fmt: skip
"""Rows of 1, 129 and 700 tokens, and 77 tokens that share the prompt of the row before."""
ROUNDINGS = 4
"""Units of its precision that a result may differ by. Flash attention rounds four times, by half a
unit at most. The rest is for sums."""
FUSED_ROUNDINGS = 16
"""Units of its precision that outputs may differ by, as a relative root mean square: two ways of
rounding in bf16 differ by two or three units behind 32 layers."""
SUMMED = 1000  # numbers that an example sums in float32, at most; each may add a unit of float32


class Comparison(NamedTuple):
    """The largest error of a result, relative to the largest number of its row."""

    kernel: str
    error: float
    bound: float


def check(device: torch.device, precision: Precision) -> list[Comparison]:
    """Compare all examples. Raises StageError if a result differs.

    Products of float32 are exact meanwhile: where TF32 is allowed, its rounding would hide errors.
    """
    allowed, dtype = torch.get_float32_matmul_precision(), DTYPES[precision]
    torch.set_float32_matmul_precision("highest")
    try:
        found = [*compare_head(device, dtype), *compare_token(device, dtype)]
        for width, window in itertools.product((64, 80, 128), (None, 17)):
            found += compare_attention(device, dtype, width, window)
    finally:
        torch.set_float32_matmul_precision(allowed)
    slow = "" if precision == "fp32" else "set deepspeed.precision to fp32, or "
    fix = f"{slow}install another version of torch or of the driver"
    refuse_errors(found, precision, device, fix)
    return found


require_sound_kernels = cache(check)
"""`check`, once in each process."""


def refuse_errors(
    found: Sequence[Comparison], precision: Precision, device: torch.device, fix: str
) -> None:
    """Raise StageError if a result differs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    for kernel, error, bound in found:
        if not error <= bound:  # also if the error is not a number
            raise StageError(
                f"{kernel} in {precision} on {name} with torch {torch.__version__}: found an error "
                f"of {error:.2g}, expected at most {bound:.2g}. Fix: {fix}"
            )


@torch.no_grad()
def use_kernels(
    model: nn.Module, kernels: Kernels, precision: Precision, device: torch.device
) -> None:
    """Give a model or an engine fused kernels.

    All ranks call this together. Raises ConfigError if the model's family has no such kernels, and
    StageError if the model has other outputs with Liger's.
    """
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
        attention = torch.compiler.disable(packing.packed_attention)
        AttentionInterface.register(packing.PACKED, attention)
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
    bound = FUSED_ROUNDINGS * torch.finfo(DTYPES[precision]).eps
    bound += SUMMED * torch.finfo(torch.float32).eps
    found = Comparison(f"Liger in a {family}", float(error), bound)
    refuse_errors([found], precision, device, "set deepspeed.kernels to null")


def compare_attention(
    device: torch.device, dtype: torch.dtype, width: int, window: int | None, groups: int = 2
) -> list[Comparison]:
    """Packed attention with four heads of `width`, and `groups` heads of keys and values."""

    def compute(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=4 // groups)
        rows, scale = ROWS.packed().to(query.device), width**-0.5
        output, _ = packing.packed_attention(
            module, query[None], key[None], value[None], None,
            packed_rows=rows, scaling=scale, sliding_window=window,
        )  # fmt: skip
        return [output]

    shapes = [(heads, ROWS.packed().ids.numel(), width) for heads in (4, groups, groups)]
    return _compare(f"attention, heads of {width}, window {window}", compute, shapes, device, dtype)


def compare_token(device: torch.device, dtype: torch.dtype) -> list[Comparison]:
    """The attention of the newest token in four heads, to 300 tokens and fewer in two groups."""

    def compute(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        columns = torch.arange(300, device=query.device)
        seen = columns >= torch.tensor([[0], [100], [290]], device=query.device)
        module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=2)
        how: Any = {"scaling": 0.125}
        return [packing.packed_attention(module, query, key, value, seen[:, None, None], **how)[0]]

    shapes = [(3, 4, 1, 64), (3, 2, 300, 64), (3, 2, 300, 64)]
    return _compare("attention of one token", compute, shapes, device, dtype)


def compare_head(device: torch.device, dtype: torch.dtype) -> list[Comparison]:
    """A head with a bias and a padded vocabulary, and tokens that are sampled from logits."""

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
        ids, head = torch.arange(66, device=hidden.device).view(2, 33) * 15, (weight / 8, bias)
        how: Any = {"temperature": 0.7, "vocab_size": 990, "chunk": 20_000, "head": head}
        return logprobs.logprobs_and_entropy(hidden, ids, **how)

    def sample(logits: Tensor) -> list[Tensor]:
        draws = (torch.arange(256, device=logits.device).double() + 0.5) / 256
        tokens, found = logprobs.sampled(logits, draws, 0.7, 990)
        return [found, tokens.double()]

    shapes = [(2, 33, 64), (1000, 64), (1000,)]
    return [
        *_compare("log-probabilities", compute, shapes, device, dtype),
        *_compare("sampling", sample, [(256, 1000)], device, dtype),
    ]


def _compare(
    kernel: str,
    compute: Callable[..., Sequence[Tensor]],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Comparison]:
    """Compare results of random inputs, and their gradients, with those of the CPU in float32."""

    @torch.enable_grad()
    def results(inputs: Sequence[Tensor]) -> list[Tensor]:
        draw = torch.Generator().manual_seed(2)
        inputs = [x.detach().requires_grad_() for x in inputs]
        found = compute(*inputs)
        traced = [x for x in found if x.requires_grad]
        weights = [torch.randn(x.shape, generator=draw).bfloat16().to(x) for x in traced]
        return [x.detach().cpu() for x in (*found, *torch.autograd.grad(traced, inputs, weights))]

    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    found = results([x.to(device) for x in inputs])
    expected = results([x.float() for x in inputs])
    sums = SUMMED * torch.finfo(torch.float32).eps
    compared = []
    for own, other in zip(found, expected, strict=True):
        # Relative to the largest number of a row or, if that is larger, the root mean square.
        scale = other.abs().amax(-1, keepdim=True).clamp(min=other.square().mean().sqrt())
        error = float(((own - other).abs() / scale).max())
        bound = sums + ROUNDINGS * torch.finfo(own.dtype).eps
        compared.append(Comparison(kernel, error, bound))
    return compared
