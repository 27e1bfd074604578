"""Products of float32 matrices by oneDNN: forward and gradients beside float64, and where."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from rlhf_pipeline.distributed.products import prefers_onednn, use_onednn, uses_onednn
from rlhf_pipeline.rl.logprobs import logprobs_and_entropy

ROUNDINGS = 40 * torch.finfo(torch.float32).eps  # of sums of some hundred numbers


@pytest.fixture
def _onednn():
    use_onednn(True)  # until the end of the test, see conftest.py


def layer_without_bias(inputs, weight, bias):
    return linear(inputs, weight) * bias


def convolution_of_gpt2(inputs, weight, bias):
    return torch.addmm(bias, inputs.flatten(0, 1), weight.T.contiguous())


def scaled(inputs, weight, bias):
    return torch.addmm(bias, inputs.flatten(0, 1), weight.T, beta=0.5, alpha=2.0)


def sum_of_matrices(inputs, weight, bias):
    return torch.addmm(linear(inputs[0], weight), inputs[1], weight.T) + bias


def strided_bias(inputs, weight, bias):
    twice = torch.stack([bias, bias], 1)
    return torch.addmm(twice[:, 0], inputs.flatten(0, 1), weight.T)


def expanded_bias(inputs, weight, bias):
    return linear(inputs, weight, bias[:1].expand(len(bias)))


def overlapping(inputs, weight, bias):
    rows = weight.shape[1]
    part = weight.flatten()[: 2 * rows + 96].as_strided((rows, 96), (2, 1))
    return inputs.flatten(0, 1) @ part + bias[:96]


def transposed(inputs, weight, bias):
    return (weight @ inputs.flatten(0, 1).T).T + bias


def head(inputs, weight, bias):
    ids = torch.arange(2 * 96).view(2, 96)
    return torch.stack(logprobs_and_entropy(inputs / 8, ids, head=(weight, bias)))


@pytest.mark.parametrize("width", [1, 7, 128])
@pytest.mark.parametrize(
    "compute",
    [
        linear, layer_without_bias, convolution_of_gpt2, scaled, sum_of_matrices, strided_bias,
        expanded_bias, overlapping, transposed, head,
    ],
)  # fmt: skip
def test_results_and_gradients_are_those_of_float64(_onednn, compute, width):
    draw = torch.Generator().manual_seed(1)
    shapes = [(2, 96, width), (384, width), (384,)]
    inputs = [torch.randn(shape, generator=draw).double() / width**0.25 for shape in shapes]
    found, expected = [], []
    for results, dtype in ((found, torch.float32), (expected, torch.float64)):
        own = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        results.append(compute(*own))
        results[0].sin().sum().backward()
        results += [x.grad for x in own]
    for own, exact in zip(found, expected, strict=True):
        assert (own - exact).abs().max() <= ROUNDINGS * exact.abs().max()


def computed_by_onednn(module, inputs):
    """The products of a forward and a backward pass that oneDNN has computed."""
    with torch.profiler.profile() as profile:
        module(inputs).square().sum().backward()
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())


def test_shapes_that_do_not_fit_are_named_as_by_torch(_onednn):
    with pytest.raises(RuntimeError, match="128x128 and 127x128"):
        torch.randn(128, 128) @ torch.randn(127, 128)


def test_one_dnn_computes_large_products_in_float32_and_no_others(_onednn):
    assert computed_by_onednn(nn.Linear(128, 384), torch.randn(96, 128)) == 2
    assert computed_by_onednn(nn.Linear(128, 384), torch.randn(96, 128, requires_grad=True)) == 3
    assert computed_by_onednn(nn.Linear(128, 384).bfloat16(), torch.randn(96, 128).bfloat16()) == 0
    assert computed_by_onednn(nn.Linear(128, 1), torch.randn(20_000, 128)) == 0
    assert computed_by_onednn(nn.Linear(16, 16), torch.randn(16, 16)) == 0


def test_a_process_can_return_to_the_products_of_torch():
    module, inputs = nn.Linear(128, 128), torch.randn(128, 128)
    use_onednn(True)
    use_onednn(True)
    assert uses_onednn() and computed_by_onednn(module, inputs) == 2
    use_onednn(False)
    assert not uses_onednn() and computed_by_onednn(module, inputs) == 0


X86 = "vendor_id\t: {}\ncpu family\t: {}\nflags\t\t: {}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86.format("AuthenticAMD", 26, "avx2 avx512f avx512_bf16"), True),
        (X86.format("AuthenticAMD", 26, "avx avx2 fma"), False),
        (X86.format("AuthenticAMD", 25, "avx2 avx512f"), False),
        (X86.format("GenuineIntel", 6, "avx2 avx512f amx_tile"), False),
        ("CPU implementer\t: 0x41\nFeatures\t: fp asimd bf16\n", False),
    ],
)
def test_zen_5_prefers_it(tmp_path, text, expected):
    if not torch.backends.mkl.is_available():
        pytest.skip("torch has no MKL on this processor, so nothing is replaced")
    (tmp_path / "cpuinfo").write_text(text)
    assert prefers_onednn(tmp_path / "cpuinfo") is expected
    assert not prefers_onednn(tmp_path / "absent")
