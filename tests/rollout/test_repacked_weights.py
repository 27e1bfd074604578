"""Linear layers with rearranged weights."""

import pytest
import torch
from torch import nn

from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.rollout.transformers_generator import repacked

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@torch.no_grad()
def test_the_model_computes_the_same_and_gets_its_layers_back(make_model, family, dtype):
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("needs a CPU with products in bf16, such as AVX-512")
    model = load_policy(make_model(family), dtype)
    expected = model(IDS).logits
    with repacked(model, rows=2):
        layers = [layer for layer in model.modules() if "forward" in vars(layer)]
        torch.testing.assert_close(model(IDS).logits, expected)
    assert layers
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]


@torch.no_grad()
def test_the_next_block_sees_the_weights_of_an_optimizer_step():
    layer = nn.Linear(8, 4)
    inputs = torch.randn(2, 8)
    for _ in range(2):
        with repacked(layer, rows=2):
            torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias)
        layer.weight += 1.0


def test_an_error_in_the_block_restores_the_layers():
    layer = nn.Linear(8, 4)
    with pytest.raises(ZeroDivisionError), repacked(layer, rows=2):
        1 / 0  # noqa: B018
    assert "forward" not in vars(layer)


def test_weights_that_are_sharded_stay():
    layer = nn.Linear(8, 4)
    layer.weight.data = torch.empty(0)
    with repacked(layer, rows=2):
        assert "forward" not in vars(layer)
