"""The sizes of models beside the weights that transformers makes, and the published models."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.training import LoRAConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.models import Shape, base_model_shape, find_model


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the model cards and papers say.
    [
        ("opt-125m", 0.125), ("opt-350m", 0.331), ("opt-1.3b", 1.316), ("opt-175b", 174.6),
        ("bloom", 176.2), ("bloom-560m", 0.559),
        ("llama-2-7b", 6.74), ("llama-2-70b", 69.0), ("llama-3-8b", 8.03),
        ("mistral-7b", 7.24), ("qwen2.5-0.5b", 0.494), ("qwen2.5-32b", 32.8),
        ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(name, billions):
    assert find_model(name).shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_the_shape_comes_from_architecture_folder_or_table(tmp_path):
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "intermediate_size": 100}
    built = BaseModelConfig(architecture=fields, vocab_size=1000)
    assert base_model_shape(built).vocab == 1000
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 300}))
    assert base_model_shape(BaseModelConfig(path=str(tmp_path))).vocab == 300
    bloom = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(bloom | {"vocab_size": 250880}))
    own = base_model_shape(BaseModelConfig(path=str(tmp_path)))
    assert own == find_model("bloom-560m").shape, "the names of 2022, as on the hub"
    null = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 100, "intermediate_size": None}
    assert Shape.of(null).intermediate == 100, "a null under another name hides no value"
    assert base_model_shape(BaseModelConfig(path="facebook/opt-1.3b")).hidden == 2048
    assert base_model_shape(BaseModelConfig(path="someone/something")) is None


COMMON = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
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
    assert shape.adapters(LoRAConfig(rank=8)) == 3 * 8 * (128 + 96 + 96 + 128 + 264 + 264 + 264)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "qwen3_moe", **GROUPED}, r"a mixture of experts \(qwen3_moe\)"),
        ({"model_type": "own", "hidden_size": 64}, "a configuration of model_type own without"),
    ],
)
def test_a_model_whose_sizes_are_not_known_is_refused(config, found):
    with pytest.raises(ConfigError, match=f"^base_model: found {found}"):
        Shape.of(config)
