"""Generation by transformers, with given random numbers."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from rlhf_pipeline.config.training import LoRAConfig, SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.generation import decoding
from rlhf_pipeline.generation.decoding import PreallocatedLayer
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.generation.transformers_generator import TransformersGenerator, repacked
from rlhf_pipeline.models.forward import probe_capabilities
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.lora import add_adapters
from rlhf_pipeline.rl.logprobs import sampled

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def policy(make_model):
    folder = make_model("llama", seed=3)
    return freeze(load_policy(folder, "fp32")), TokenContract.read(folder)


@pytest.fixture(scope="module")
def generator(policy):
    return TransformersGenerator(*policy)


def responses(sequences):
    rows = zip(sequences.response_ids, sequences.action_mask, strict=True)
    return [row[mask].tolist() for row, mask in rows]


def test_several_responses_to_a_prompt_read_it_once(policy, generator):
    sampling, seeds = SamplingConfig(max_response_tokens=12), row_seeds(1, 1, np.arange(12))
    probe_capabilities(policy[0])  # probes the model
    read = []
    hook = policy[0].register_forward_pre_hook(
        lambda _, args, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    together = generator.generate(PROMPTS * 3, sampling, seeds, [7, 6, 5, 4] * 3)
    assert read[0] == sum(map(len, PROMPTS))
    read.clear()
    generator.generate(PROMPTS * 3, sampling, seeds)  # equal tokens may be different prompts
    assert read[0] == 3 * sum(map(len, PROMPTS))
    hook.remove()
    alone = [generator.generate(PROMPTS, sampling, seeds[first : first + 4]) for first in (0, 4, 8)]
    assert responses(together.sequences) == [
        row for rollout in alone for row in responses(rollout.sequences)
    ]


def test_the_keys_and_values_of_a_batch_are_freed_at_its_end(generator):
    """Without a garbage collection: the next batch needs the memory."""
    gc.collect()
    gc.disable()
    try:
        sampling = SamplingConfig(max_response_tokens=2)
        generator.generate(PROMPTS, sampling, [(0, n) for n in range(4)])
        assert not [each for each in gc.get_objects() if isinstance(each, PreallocatedLayer)]
    finally:
        gc.enable()


def test_finished_rows_leave_the_batch_and_the_others_do_not_notice(policy, generator, monkeypatch):
    """The forward passes get smaller, and every response stays the one of its row alone."""
    sampling = SamplingConfig(max_response_tokens=24, batch_size_per_gpu=8)
    seeds, sizes = row_seeds(5, 1, np.arange(8)), []
    ends = replace(policy[1], eos_ids=tuple(range(1, 40)))  # about one token of seven
    together = TransformersGenerator(policy[0], ends)

    def counted(logits, *rest):
        sizes.append(len(logits))
        return sampled(logits, *rest)

    monkeypatch.setattr(decoding, "sampled", counted)
    whole = responses(together.generate(PROMPTS * 2, sampling, seeds).sequences)
    assert sizes[0] == 8 and sizes[-1] < 8 and sorted(sizes, reverse=True) == sizes
    alone = [
        responses(together.generate([prompt], sampling, [seed]).sequences)[0]
        for prompt, seed in zip(PROMPTS * 2, seeds, strict=True)
    ]
    assert whole == alone
    assert {len(row) for row in whole} != {24}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, True),
        ({"sliding_window": 64}, True),
        ({"sliding_window": 63}, False),
        ({"layer_types": ["full_attention"] * 2}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_a_window_that_is_shorter_than_the_responses_needs_a_mask_of_its_own(fields, expected):
    assert decoding.takes_prepared_mask(PreTrainedConfig(**fields), 64) is expected


def test_so_does_one_in_the_text_part_of_a_model_with_images(architecture):
    config = AutoConfig.for_model("gemma3", text_config=architecture("gemma3_text"))
    assert decoding.takes_prepared_mask(config, 64) is False


IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="needs a CPU with products in bf16, such as AVX-512",
)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=BF16)])
@torch.no_grad()
def test_the_model_computes_the_same_and_gets_its_layers_back(make_model, family, dtype):
    model = load_policy(make_model(family), dtype)
    expected = model(IDS).logits
    with repacked(model, rows=2):
        layers = [layer for layer in model.modules() if "forward" in vars(layer)]
        torch.testing.assert_close(model(IDS).logits, expected)
    assert layers
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]


@torch.no_grad()
def test_the_next_block_sees_the_weights_of_an_optimizer_step_or_an_error():
    layer, inputs = nn.Linear(8, 4), torch.randn(2, 8)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), repacked(layer, rows=2):
            torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias)
            1 / 0  # noqa: B018
        layer.weight += 1.0
    assert "forward" not in vars(layer)
    layer.weight.data = torch.empty(0)  # sharded
    with repacked(layer, rows=2):
        assert "forward" not in vars(layer)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "opt"])  # without biases and with them
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-6), pytest.param("bf16", 2**-5, marks=BF16)]
)
def test_adapters_are_added_to_the_weights_meanwhile(make_model, family, precision, tolerance):
    """Those in float32 also to weights in bfloat16."""
    model = load_policy(make_model(family), precision)
    add_adapters(model, LoRAConfig())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.float()
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    expected = model(IDS).logits
    products = []
    with repacked(model, rows=2):
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda layer, *_: products.append(layer))
        found = model(IDS).logits
    assert found.dtype == expected.dtype
    error = (found - expected).float().square().mean().sqrt()
    assert error <= tolerance * expected.float().square().mean().sqrt()
    assert products == [model.get_output_embeddings()]  # the only layer without adapters
    torch.testing.assert_close(model(IDS).logits, expected)
