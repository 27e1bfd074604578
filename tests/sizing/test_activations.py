"""The activations that a forward pass keeps, beside the tensors that autograd saves."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.models.forward import response_logprobs
from rlhf_pipeline.models.logprob_head import install
from rlhf_pipeline.models.lora import add_adapters
from rlhf_pipeline.models.packing import use_packed_attention
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.rl import logprobs
from rlhf_pipeline.sizing import memory
from rlhf_pipeline.sizing.memory import Numbers
from rlhf_pipeline.sizing.shape import Shape

TOKENS = 4 * 48
FIELDS = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {"intermediate_size": 320, "num_key_value_heads": 4},
    "qwen2": {"intermediate_size": 320, "num_key_value_heads": 2},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128},
    "gpt2": {},
}


def test_logits_exist_in_the_chunks_that_the_plan_assumes():
    assert memory.CHUNK == logprobs.CHUNK


def saved_bytes(model_type, layers, dtype, *, lora):
    """Bytes of all tensors that the backward pass will read, without weights."""
    fields = FIELDS | FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **fields)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = config.dropout = 0.0
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    use_packed_attention(model)
    install(model)
    if lora:
        add_adapters(model, LoRAConfig(rank=8))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = []
    batch = collate([[5 + row] * 24 for row in range(4)], [[9] * 24] * 4, 0)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        response_logprobs(model, batch, vocab_size=300)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in kept}
    return sum(own.nbytes() for place, own in storages.items() if place not in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_layer_keeps_what_autograd_saves(model_type, dtype):
    few, more = (saved_bytes(model_type, layers, dtype, lora=False) for layers in (1, 3))
    fields = FIELDS | FAMILIES[model_type] | {"model_type": model_type, "num_hidden_layers": 3}
    numbers = Numbers(dtype.itemsize, on_gpu=False)
    assert memory.of_layer(Shape.of(fields), numbers) * TOKENS == pytest.approx(
        (more - few) / 2, rel=0.02
    )


def test_frozen_norms_keep_less():
    few, more = (saved_bytes("llama", layers, torch.float32, lora=True) for layers in (1, 3))
    shape = Shape.of(FIELDS | FAMILIES["llama"] | {"model_type": "llama", "num_hidden_layers": 3})
    numbers = Numbers(4, on_gpu=False, norms_train=False)
    # The adapters keep 8 numbers for each of 7 layers besides.
    assert (memory.of_layer(shape, numbers) + 7 * 8 * 4) * TOKENS == pytest.approx(
        (more - few) / 2, rel=0.02
    )


def test_checkpointing_keeps_inputs_and_one_layer():
    shape = Shape.of(FIELDS | FAMILIES["opt"] | {"model_type": "opt", "num_hidden_layers": 10})
    numbers = Numbers(4, on_gpu=True)
    # fp32, d = 128, i = 512: norms 2 * 2d, attention 5d, ReLU i; last norm 2d; passing 2i + 2d.
    layer, rest = 4 * (4 * 128 + 5 * 128 + 512), 4 * (2 * 128 + 2 * 512 + 2 * 128)
    assert memory.kept(shape, numbers, 7, checkpointing=False) == 7 * (10 * layer + rest)
    assert memory.kept(shape, numbers, 7, checkpointing=True) == 7 * (layer + 10 * 4 * 128 + rest)
