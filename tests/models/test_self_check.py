"""Kernels beside the CPU in float32: sound ones pass with a margin, broken ones fail by far."""

import pytest
import torch
from torch.nn.attention import varlen
from varlen_reference import varlen_attn

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models import packing
from rlhf_pipeline.models.kernels import check, compare_attention
from rlhf_pipeline.rl import logprobs

CPU = torch.device("cpu")
NO_GPU = not torch.cuda.is_available()
no_gpu = pytest.mark.skipif(NO_GPU, reason="no CUDA device: no kernel to run")


def worst(comparisons):
    """The largest error as a share of its bound."""
    return max(each.error / each.bound for each in comparisons)


@pytest.fixture
def flash(monkeypatch):
    """Runs half precision on the CPU in one kernel, which rounds as flash attention does.

    The arguments change what the kernel gets.
    """

    def install(dtype, **changes):
        def kernel(*arguments, **settings):
            changed = {name: change(settings[name]) for name, change in changes.items()}
            return varlen_attn(*arguments, **settings | changed, kept_in=dtype)

        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        monkeypatch.setattr(packing, "one_kernel", lambda kind, *_: kind == dtype)

    return install


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_cpu_passes_with_a_margin(precision):
    assert worst(check(CPU, precision)) < 0.25


@pytest.mark.parametrize("width, window, groups", [(64, None, 2), (80, 17, 4), (128, 17, 1)])
def test_attention_that_rounds_like_flash_attention_passes_with_a_margin(
    flash, width, window, groups
):
    flash(torch.bfloat16)
    found = compare_attention(CPU, torch.bfloat16, width, window, groups)
    assert [each.kernel for each in found] == [f"attention, heads of {width}, window {window}"] * 4
    assert 0.1 < worst(found) < 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": lambda size: (size[0] + 1, 0)},
        {"window_size": lambda size: (size[0], 1)},
        {"scale": lambda scale: 1.1 * scale},
    ],
    ids=["window longer", "sees the next token", "scale"],
)
def test_broken_attention_fails_by_far_in_its_output_and_every_gradient(flash, changes):
    flash(torch.bfloat16, **changes)
    found = compare_attention(CPU, torch.bfloat16, 64, 17)
    assert min(each.error / each.bound for each in found) > 4


def test_a_wrong_gradient_alone_is_found(flash, monkeypatch):
    flash(torch.bfloat16)

    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.linspace(0.9, 1.0, len(grad))[:, None, None]

    def kernel(query, *others, sound=varlen.varlen_attn, **how):
        return sound(HalfGradient.apply(query), *others, **how)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    found = compare_attention(CPU, torch.bfloat16, 64, None)
    assert [each.error > each.bound for each in found] == [False, True, False, False]


@pytest.mark.parametrize(
    ("factor", "parts"),
    [
        (2.0, (
            "attention, heads of 64, window None in bf16 on the CPU with torch ",
            "expected at most 0.031",  # 4 * 2^-7 + 1000 * 2^-23
            "Fix: set deepspeed.precision to fp32, or install another version",
        )),
        (float("nan"), ("attention, heads of 64, window None", "found an error of nan")),
    ],
    ids=["broken", "no number"],
)  # fmt: skip
def test_a_broken_kernel_is_refused_with_its_figures(flash, factor, parts):
    flash(torch.bfloat16, scale=lambda scale: factor * scale)
    with pytest.raises(StageError) as caught:
        check(CPU, "bf16")
    message = str(caught.value)
    assert message.startswith(parts[0]) and all(part in message for part in parts)


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        # A token further, and log-probabilities that are rounded to bf16.
        ("sampled", lambda tokens, found: (tokens + 1, found), "sampling in bf16"),
        ("logprobs_and_entropy", lambda *found: [x.bfloat16().float() for x in found],
         "log-probabilities in bf16"),
    ],
)  # fmt: skip
def test_a_result_in_half_precision_that_is_off_is_found(monkeypatch, name, broken, message):
    sound = getattr(logprobs, name)

    def off(inputs, *others, **how):
        found = sound(inputs, *others, **how)
        return broken(*found) if inputs.dtype == torch.bfloat16 else found

    monkeypatch.setattr(logprobs, name, off)
    torch.set_float32_matmul_precision("high")  # a model in fp32 was loaded before
    with pytest.raises(StageError, match=message):
        check(CPU, "bf16")
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 17, 129])
@pytest.mark.parametrize("width", [20, 64, 80, 128, 256])
def test_attention_on_a_gpu(dtype, width, window, groups):
    """Forward and backward; heads of 20 take the loop over rows."""
    device = torch.device("cuda", 0)
    in_one = packing.one_kernel(dtype, torch.cuda.get_device_capability(device), width)
    assert width != 20 or not in_one
    assert worst(compare_attention(device, dtype, width, window, groups)) <= 1


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_of_a_gpu(precision):
    check(torch.device("cuda", 0), precision)
