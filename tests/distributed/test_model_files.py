"""Files of a model are read exactly as they were written."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.distributed import model_files
from rlhf_pipeline.distributed.model_files import require_same
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat

DIFFERS = "the saved model differs from the model in memory"


@pytest.fixture
def saved(make_model, tmp_path):
    """A tied model in memory, its weights, and the folder it was saved to in several files."""
    model = load_policy(make_model("qwen2"), "fp32")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return model, model.state_dict(), tmp_path


@pytest.fixture(scope="module")
def mixture():
    """A model whose experts are one tensor in memory and many in the file."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def change(folder, names, how):
    """Change the stored tensors whose name contains one of `names`."""
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        for name in [name for name in stored if any(part in name for part in names)]:
            stored[name] = how(stored[name])
        save_file(stored, path, metadata={"format": "pt"})


def flip_a_bit(tensor):
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    return tensor


def test_no_second_model_is_loaded(saved, monkeypatch):
    """transformers reads it without values; every tensor is a heartbeat."""
    model, weights, folder = saved
    loaded = []
    load = type(model).from_pretrained

    def keep(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(type(model), "from_pretrained", keep)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    require_same(model, weights, folder)
    ((read, _),) = loaded
    assert all(parameter.is_meta for parameter in read.parameters())
    assert heartbeat._here.pieces == len(weights)


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.mlp.up_proj", "model.norm"])
def test_a_flipped_bit_of_any_file_is_found(saved, name):
    model, weights, folder = saved
    change(folder, [name], flip_a_bit)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: .*{name}"):
        require_same(model, weights, folder)


def test_another_shape_or_precision_is_found(saved):
    model, weights, folder = saved
    change(folder, ["model.norm"], lambda tensor: tensor[:-1].clone())
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: model\.norm"):
        require_same(model, weights, folder)
    change(folder, ["model.norm"], lambda tensor: weights["model.norm.weight"].bfloat16())
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: model\.norm"):
        require_same(model, weights, folder)


@pytest.mark.parametrize("found", ["model.norm.weight", "model.norm.other"])
def test_a_weight_too_few_or_too_many_is_found(saved, found):
    model, weights, folder = saved
    (path,) = (path for path in folder.glob("*") if path.suffix == ".safetensors"
               and "model.norm.weight" in load_file(path))  # fmt: skip
    stored = load_file(path)
    norm = stored.pop("model.norm.weight")
    others = {} if found in weights else {"model.norm.weight": norm, found: norm.clone()}
    save_file(stored | others, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: {found}"):
        require_same(model, weights, folder)


def test_a_tie_that_transformers_would_not_restore_is_found(saved):
    model, weights, folder = saved
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: lm_head\.weight"):
        require_same(model, weights, folder)


def test_a_tie_that_is_none_in_memory_is_found(saved):
    """The head was untied after the model was saved; the file has no values for it."""
    model, weights, folder = saved
    own = weights["lm_head.weight"] + 1
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: lm_head\.weight"):
        require_same(model, weights | {"lm_head.weight": own}, folder)


def test_a_family_with_another_layout_is_loaded_to_compare_it(mixture, tmp_path):
    mixture.save_pretrained(tmp_path)
    require_same(mixture, mixture.state_dict(), tmp_path)
    change(tmp_path, ["experts.2.w1"], flip_a_bit)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: .*experts\.gate_up_proj"):
        require_same(mixture, mixture.state_dict(), tmp_path)


def test_a_large_model_with_another_layout_is_compared_by_names_only(
    mixture, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(model_files, "LARGEST_SECOND_MODEL", 1000)
    mixture.save_pretrained(tmp_path)
    change(tmp_path, ["experts.2.w1"], flip_a_bit)
    with caplog.at_level(logging.WARNING):
        require_same(mixture, mixture.state_dict(), tmp_path)
    assert "names and shapes are checked, values are not" in caplog.text
    stored = load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: lm_head\.weight"):
        require_same(mixture, mixture.state_dict(), tmp_path)
