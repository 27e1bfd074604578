"""The block `base_model`, and the fields of model families without importing transformers."""

import dataclasses
import json

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.base_model import BaseModelConfig, find_family, positions, saved_config
from rlhf_pipeline.errors import ConfigError


def test_a_url_with_a_token_is_refused_and_not_repeated():
    with pytest.raises(ValidationError, match="found a URL") as refusal:
        BaseModelConfig(path="https://me:canary@huggingface.co/facebook/opt-350m")
    assert "canary" not in str(refusal.value)


def architecture(**fields):
    return BaseModelConfig(architecture=fields, vocab_size=300).architecture


def test_fields_in_the_source_equal_those_of_the_class(family):
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known, real = find_family(family), CONFIG_MAPPING[family]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field.default for field in dataclasses.fields(real)}
    own = {name for name in fields if name not in common and not name.startswith("_")}
    assert own == set(known.defaults) - common
    assert known.aliases == real.attribute_map
    assert all(known.defaults[name] in (fields[name], None) for name in own)


def test_fields_get_the_family_s_own_names_and_null_unsets_one_of_another_environment():
    given = architecture(model_type="gpt2", hidden_size=32, n_layer=2, max_position_embeddings=64)
    assert given == {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_positions": 64}
    assert architecture(**given) == given
    unset = {"max_position_embeddings": None, "intermediate_size": None, "n_inner": None}
    given = architecture(model_type="gpt2", n_positions=64, **unset)
    assert given == {"model_type": "gpt2", "n_positions": 64, "n_inner": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({},
         r"found model_type None, expected a name\. Fix: set it to a model type of Hugging Face"),
        ({"model_type": "lama"},
         r"found model_type lama \(did you mean llama\?\), expected a model type"),
        ({"model_type": "opt", "intermediate_size": 64, "layer_drop": 0.1},
         r"found intermediate_size, layer_drop \(did you mean layerdrop\?\), expected fields of "
         r"opt: hidden_size, "),
        ({"model_type": "llama", "vocab_size": 64},
         "found vocab_size, expected no field that the tokenizer determines. Fix: remove it"),
        ({"model_type": "gpt2", "n_positions": 64, "max_position_embeddings": 64},
         "found n_positions twice, under both of its names, expected one value. Fix: set one of "
         "them to null"),
        ({"model_type": "qwen2", "num_attention_heads": 4},
         "num_key_value_heads: found 32, expected a divisor of num_attention_heads 4. Fix: set "
         "it to 4, or to a smaller divisor"),
    ],
)  # fmt: skip
def test_fields_that_would_build_another_model_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        architecture(**fields)


def test_positions_of_a_saved_model(tmp_path):
    assert positions(saved_config(tmp_path)) is None
    for config, limit in (
        ({"model_type": "llama", "max_position_embeddings": 90}, 90),
        ({"model_type": "opt"}, 2048),
        ({"model_type": "bloom"}, None),
        ({"model_type": "lab's own", "max_position_embeddings": 90}, 90),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert positions(saved_config(tmp_path)) == limit
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: found .*, expected JSON"):
        saved_config(tmp_path)
