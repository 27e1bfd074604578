"""Models built from their configuration, with a trained tokenizer."""

import pytest
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.base_model import BYTES, BaseModelConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.models import base_model
from rlhf_pipeline.models.base_model import as_loaded, build_model
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import folder_digest


def test_every_family_is_built_for_the_tokenizer_that_loads_with_it(
    tokenizer, architecture, family, tmp_path
):
    config = BaseModelConfig(architecture=architecture(family), vocab_size=300)
    own = as_loaded(tokenizer, config, tmp_path)
    model = build_model(config, own)
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)

    loaded = load_tokenizer(tmp_path)
    assert TokenContract.of(loaded) == TokenContract.of(own)
    assert (own.pad_token_id, own.eos_token_id) == (0, 1)
    ids = loaded("snow is  white, 123")["input_ids"]
    assert loaded.decode(ids) == "snow is  white, 123" and max(ids) < 288

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == family
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    assert [getattr(again.config, name) for name in sizes] == [32, 2, 4]
    assert len(loaded) == (289 if family == "qwen2" else 288)
    assert again.get_input_embeddings().num_embeddings == 320  # 5 * 64
    special = ("pad", "eos", "bos")
    assert [getattr(again.config, f"{name}_token_id") for name in special] == [0, 1, None]


@pytest.mark.parametrize(
    ("value", "reason"), [("64", "expected int, got str"), (None, "got NoneType"), (33, "33")]
)
def test_an_invalid_value_is_reported(tokenizer, architecture, value, reason):
    config = BaseModelConfig(
        architecture=architecture("llama") | {"hidden_size": value}, vocab_size=300
    )
    with pytest.raises(
        ConfigError, match=rf"(?s)base_model\.architecture: cannot build the model: .*{reason}"
    ):
        build_model(config, tokenizer)


def run(folder):
    architecture = {
        "model_type": "qwen2", "num_key_value_heads": 4, "num_attention_heads": 4,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    }  # fmt: skip
    block = {"architecture": architecture, "vocab_size": 300}
    job = LaunchedJob("base_model", "f", 1, {"base_model": block}, {}, {}, folder, 60.0)
    base_model.main(job)
    return job.export


def test_a_tokenizer_that_changes_when_saved_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, "as_loaded", lambda tokenizer, *_: tokenizer)
    with pytest.raises(
        ArtifactError,
        match=r"base_model\.architecture: the tokenizer changes when it is saved and loaded",
    ):
        run(tmp_path)


def test_a_folder_that_has_changed_since_the_plan_is_refused(make_model, tmp_path):
    folder = make_model("llama", seed=5)
    block, planned = {"path": str(folder)}, {BYTES: folder_digest(folder)}
    job = LaunchedJob("base_model", "f", 1, {"base_model": block}, {}, planned, tmp_path, 60.0)
    base_model.main(job)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="found other bytes than when the stage was planned"):
        base_model.main(job)


def test_a_model_is_enlarged_for_added_tokens_alone(make_model, tmp_path):
    """A vocabulary that is larger by itself belongs to another model."""
    folder, export = make_model("llama", seed=6), tmp_path / "export"
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save_pretrained(folder)
    job = LaunchedJob(
        "base_model", "f", 1, {"base_model": {"path": str(folder)}}, {}, {}, tmp_path, 60.0
    )
    assert base_model.main(job)["base_model/new_tokens"] == 2
    assert AutoModelForCausalLM.from_pretrained(export).config.vocab_size == 320  # 290, by 64
    small = make_model("llama", seed=6, vocabulary=200)
    (folder / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    (folder / "config.json").write_text((small / "config.json").read_text())
    with pytest.raises(
        ArtifactError,
        match=r"found a vocabulary of 288 tokens, expected at most the model's 200 embeddings\. It",
    ):
        base_model.main(job)
