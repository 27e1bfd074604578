"""The table of published models."""

import json

import gguf
import numpy as np
import pytest

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.models import base_model_shape, find_model
from rlhf_pipeline.sizing.shape import Shape


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_the_sizes_of_its_model(tmp_path, tied):
    """As those of the same model in a folder: two layers 32 wide, 4 heads that share 2 of keys."""
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "b", "c", "d"])
    for name in ["token_embd.weight", *([] if tied else ["output.weight"])]:
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = base_model_shape(BaseModelConfig(path=str(file)))
    assert shape == Shape(
        model_type="llama", hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_size=8,
        vocab=4, positions=0, is_tied=tied, embedding=32,
    )  # fmt: skip
