"""The table of published models."""

import json

import pytest

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.models import base_model_shape, find_model


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the model cards and papers say.
    [
        ("opt-125m", 0.125),
        ("opt-350m", 0.331),
        ("opt-1.3b", 1.316),
        ("opt-175b", 174.6),
        ("bloom", 176.2),
        ("bloom-560m", 0.559),
        ("llama-2-7b", 6.74),
        ("llama-2-70b", 69.0),
        ("llama-3-8b", 8.03),
        ("mistral-7b", 7.24),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-32b", 32.8),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
    ],
)
def test_sizes_are_the_published_ones(name, billions):
    assert find_model(name).shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"found 'opt-1.3' \(did you mean opt-1.3b\?\)"):
        find_model("opt-1.3")


def test_the_shape_comes_from_architecture_folder_or_table(tmp_path):
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "intermediate_size": 100}
    built = BaseModelConfig(architecture=fields, vocab_size=1000)
    assert base_model_shape(built).vocab == 1000
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 300}))
    assert base_model_shape(BaseModelConfig(path=str(tmp_path))).vocab == 300
    assert base_model_shape(BaseModelConfig(path="facebook/opt-1.3b")).hidden == 2048
    assert base_model_shape(BaseModelConfig(path="someone/something")) is None
