"""A family's own field names, known before anything heavy is imported."""

import dataclasses
import subprocess
import sys

import pytest

from rlhf_pipeline.config.architecture import find_family
from rlhf_pipeline.config.base_model import BaseModelConfig


def architecture(**fields):
    return BaseModelConfig(architecture=fields, vocab_size=300).architecture


def test_the_source_tells_what_the_class_would(family):
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known, real = find_family(family), CONFIG_MAPPING[family]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field.default for field in dataclasses.fields(real)}
    own = {name for name in fields if name not in common and not name.startswith("_")}
    assert own == set(known.defaults) - common
    assert known.aliases == real.attribute_map
    assert all(known.defaults[name] in (fields[name], None) for name in own)


def test_transformers_is_not_imported_for_it():
    script = (
        "import sys; from rlhf_pipeline.config.architecture import find_family; find_family('opt');"
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_fields_go_by_the_family_s_own_names():
    given = architecture(model_type="gpt2", hidden_size=32, n_layer=2, max_position_embeddings=64)
    assert given == {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_positions": 64}
    assert architecture(**given) == given


def test_null_takes_back_what_another_environment_gave():
    given = architecture(
        model_type="gpt2",
        n_positions=64,
        max_position_embeddings=None,
        intermediate_size=None,
        n_inner=None,
    )
    assert given == {"model_type": "gpt2", "n_positions": 64, "n_inner": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "architecture has no model_type; name a Hugging Face one, such as llama or opt"),
        (
            {"model_type": "lama"},
            r"model_type lama is none that transformers has \(did you mean llama\?\)",
        ),
        (
            {"model_type": "opt", "hiden_size": 32},
            r"opt has no field hiden_size \(did you mean hidden_size\?\)",
        ),
        (
            {"model_type": "opt", "intermediate_size": 64, "layer_drop": 0.1},
            r"opt has no field intermediate_size, layer_drop \(did you mean layerdrop\?\); known are hidden_size, ",
        ),
        (
            {"model_type": "gpt2", "n_position": 32},
            r"gpt2 has no field n_position \(did you mean n_positions\?\)",
        ),
        (
            {"model_type": "bloom", "max_position_embeddings": 64},
            "bloom has no field max_position_embeddings",
        ),
        (
            {"model_type": "llama", "output_attentions": True},
            "llama has no field output_attentions",
        ),
        (
            {"model_type": "llama", "vocab_size": 64},
            "vocab_size comes from the tokenizer; leave it out",
        ),
        (
            {"model_type": "gpt2", "n_positions": 64, "max_position_embeddings": 64},
            "n_positions is given twice, as n_positions and under another name; set one of them to null",
        ),
        (
            {"model_type": "qwen2", "num_attention_heads": 4},
            "num_key_value_heads 32 does not divide num_attention_heads 4; set it to 4, or to a divisor",
        ),
        (
            {"model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads 3 does not divide num_attention_heads 4",
        ),
    ],
)
def test_what_would_build_another_model_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        architecture(**fields)
