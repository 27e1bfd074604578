"""Kernels beside the CPU in float32: sound ones pass with a margin, broken ones fail by far."""

from functools import partial

import pytest
import torch
from torch.nn.attention import varlen
from varlen_reference import varlen_attn

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models import kernels, packing
from rlhf_pipeline.models.kernels import check, compare_attention, compare_head
from rlhf_pipeline.rl import logprobs

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]
no_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: no kernel to run"
)


def worst(comparisons):
    """The largest error as a share of its bound."""
    return max(each.error / each.bound for each in comparisons)


def smallest(comparisons):
    return min(each.error / each.bound for each in comparisons)


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_cpu_passes_with_a_margin(precision):
    assert worst(check(CPU, precision)) < 0.25


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width, window, groups", [(64, None, 2), (80, 17, 4), (128, 17, 1)])
def test_attention_that_rounds_like_flash_attention_passes_with_a_margin(
    flash, dtype, width, window, groups
):
    flash(dtype)
    found = compare_attention(CPU, dtype, width, window, groups)
    assert [each.kernel for each in found] == [f"attention, heads of {width}, window {window}"] * 4
    assert 0.1 < worst(found) < 0.5


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": lambda size: (size[0] + 1, 0)},
        {"window_size": lambda size: (size[0] - 1, 0)},
        {"window_size": lambda size: (-1, 0)},
        {"window_size": lambda size: (size[0], 1)},
        {"scale": lambda scale: 1.1 * scale},
    ],
    ids=["window longer", "window shorter", "no window", "sees the next token", "scale"],
)
def test_broken_attention_fails_by_far_in_its_output_and_every_gradient(flash, dtype, changes):
    flash(dtype, **changes)
    assert smallest(compare_attention(CPU, dtype, 64, 17)) > 4


def test_a_wrong_gradient_alone_is_found(flash, monkeypatch):
    flash(torch.bfloat16)

    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.linspace(0.9, 1.0, len(grad))[:, None, None]

    sound = varlen.varlen_attn
    monkeypatch.setattr(
        varlen,
        "varlen_attn",
        lambda q, *others, **how: sound(HalfGradient.apply(q), *others, **how),
    )
    found = compare_attention(CPU, torch.bfloat16, 64, None)
    assert [each.error > each.bound for each in found] == [False, True, False, False]


def test_a_broken_kernel_is_refused_with_its_figures(flash):
    flash(torch.bfloat16, scale=lambda scale: 2 * scale)
    with pytest.raises(StageError) as caught:
        check(CPU, "bf16")
    message = str(caught.value)
    assert message.startswith("attention, heads of 64, window None in bf16 on the CPU with torch ")
    assert "expected at most 0.031" in message  # 4 * 2^-7 + 1000 * 2^-23
    assert "Fix: set deepspeed.precision to fp32, or install another version" in message


def test_logits_that_are_rounded_are_found(monkeypatch):
    """As by a product whose result is in bf16, of which only the log-probabilities suffer."""

    def rounded(left, right):
        return (left.float() @ right.float()).to(left.dtype).float()

    monkeypatch.setattr(logprobs, "_matmul", rounded)
    found = {each.kernel: each for each in compare_head(CPU, torch.bfloat16)[:1]}
    assert worst(found.values()) > 5


def test_a_result_that_is_not_a_number_is_refused(monkeypatch):
    def broken(left, right):
        return (left.float() @ right.float()).log()

    monkeypatch.setattr(logprobs, "_matmul", broken)
    with pytest.raises(StageError, match="found an error of nan"):
        check(CPU, "fp32")


def test_a_sampler_that_is_one_token_off_is_found(monkeypatch):
    def off(logits, *others):
        tokens, found = sound(logits, *others)
        return tokens + (logits.dtype == torch.bfloat16), found

    sound = logprobs.sampled
    monkeypatch.setattr(logprobs, "sampled", off)
    with pytest.raises(StageError, match="sampling in bf16"):
        check(CPU, "bf16")


def test_a_process_checks_each_precision_of_its_gpu_once_and_no_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "check", lambda *given: seen.append(given))
    gpu = torch.device("cuda", 7)
    for device, precision in ((gpu, "bf16"), (gpu, "fp32"), (gpu, "bf16"), (CPU, "bf16")):
        kernels.require_sound_kernels(device, precision)
    assert seen == [(gpu, "bf16"), (gpu, "fp32")]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_engine_and_frozen_model_checks_its_precision_before_it_loads(
    make_model, world, monkeypatch, stage
):
    from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, TrainedModelConfig
    from rlhf_pipeline.distributed import engine

    asked = []
    monkeypatch.setattr(
        engine, "require_sound_kernels", lambda *given: asked.append(given) or 1 / 0
    )
    settings = {"optimizer": {"learning_rate": 1}, "deepspeed": {"zero_stage": 1}}
    settings["deepspeed"]["precision"] = "bf16"
    never = partial(pytest.fail, "it was loaded before the check")
    with pytest.raises(ZeroDivisionError):
        engine.train_engine(never, TrainedModelConfig.model_validate(settings), 1)
    frozen = FrozenDeepSpeedConfig(zero_stage=stage, precision="bf16")
    with pytest.raises(ZeroDivisionError):
        engine.frozen_model(never, frozen, world)
    assert asked == [(world.device, "bf16")] * 2


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
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
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_log_probabilities_and_the_sampler_on_a_gpu(dtype):
    assert worst(compare_head(torch.device("cuda", 0), dtype)) <= 1


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_check_of_a_gpu(precision):
    check(torch.device("cuda", 0), precision)
