"""The sizes of a model from its config.json, beside the weights that transformers makes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.shape import Shape

COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 200}
CONFIGURATIONS = {
    "opt": COMMON | {"ffn_dim": 256, "max_position_embeddings": 126, "word_embed_proj_dim": 32},
    "bloom": COMMON,
    "gpt2": COMMON | {"n_positions": 128},
    "gpt_neox": COMMON | {"intermediate_size": 256},
    "llama": GROUPED,
    "mistral": GROUPED | {"head_dim": 32},
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma": GROUPED | {"head_dim": 32},
    "phi3": GROUPED,
    "phi": COMMON | {"intermediate_size": 256},
    "stablelm": GROUPED,
    "olmo2": GROUPED,
}


def count(model_class, model_type, fields):
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = model_class.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", CONFIGURATIONS)
def test_weights_are_those_that_transformers_makes(model_type):
    """Exactly, or within 0.5% for a family with norms or biases of its own."""
    fields = CONFIGURATIONS[model_type]
    counted = count(AutoModelForCausalLM, model_type, fields)
    found = Shape.of({"model_type": model_type, **fields}).parameters
    exact = model_type in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3")
    assert found == (counted if exact else pytest.approx(counted, rel=0.005))


def test_a_reward_model_has_a_vector_in_place_of_the_output_layer():
    fields = CONFIGURATIONS["llama"] | {"num_labels": 1}
    counted = count(AutoModelForSequenceClassification, "llama", fields)
    assert Shape.of({"model_type": "llama", **fields}).body + 64 == counted


def test_adapters_have_rank_weights_for_each_input_and_output():
    shape = Shape.of({"model_type": "llama", **GROUPED})
    # q 64+64, k and v 64+32, o 64+64, gate and up 64+200, down 200+64; three layers.
    assert shape.adapters(8) == 3 * 8 * (128 + 96 + 96 + 128 + 264 + 264 + 264)


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ConfigError, match=r"^base_model: found a mixture of experts \(qwen3_moe\)"):
        Shape.of({"model_type": "qwen3_moe", **GROUPED})


def test_a_model_without_sizes_is_refused():
    with pytest.raises(ConfigError, match="found a configuration of model_type own without"):
        Shape.of({"model_type": "own", "hidden_size": 64})
