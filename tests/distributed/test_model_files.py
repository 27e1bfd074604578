"""Files of a model are read exactly as they were written."""

import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed import model_files
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import require_same, save_model
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
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


def change(folder, part, how):
    """Change the stored tensors whose name contains `part`; without `how`, remove them."""
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        for name in [name for name in stored if part in name]:
            tensor = stored.pop(name)
            stored |= {} if how is None else {name: how(tensor)}
        save_file(stored, path, metadata={"format": "pt"})


def flip_a_bit(tensor):
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    return tensor


def test_no_second_model_is_loaded(saved, monkeypatch):
    """transformers reads it without values; every tensor is a heartbeat."""
    model, weights, folder = saved
    loaded, load = [], type(model).from_pretrained

    def keep(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(type(model), "from_pretrained", keep)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    require_same(model, weights, folder)
    ((read, _),) = loaded
    assert all(parameter.is_meta for parameter in read.parameters())
    assert heartbeat._here.pieces == len(weights)


def untie(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))


def add_a_weight(folder):
    path = next(folder.glob("*.safetensors"))
    more = {"model.norm.other": torch.ones(32)}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


def stored(part, how):
    return partial(change, part=part, how=how)


DAMAGE = {
    "a bit of the first file": (stored("embed_tokens", flip_a_bit), "embed_tokens"),
    "a bit of a later file": (stored("layers.1.mlp.up_proj", flip_a_bit), "layers.1.mlp.up_proj"),
    "a bit of the last file": (stored("model.norm", flip_a_bit), "model.norm"),
    "shape": (stored("model.norm", lambda weight: weight[:-1].clone()), "model.norm"),
    "precision": (stored("model.norm", torch.Tensor.bfloat16), "model.norm"),
    "a weight too few": (stored("model.norm", None), "model.norm.weight"),
    "a weight too many": (add_a_weight, "model.norm.other"),
    "a tie that transformers would not restore": (untie, "lm_head.weight"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damage_is_found(saved, name):
    model, weights, folder = saved
    damage, found = DAMAGE[name]
    damage(folder)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: .*{found}"):
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
    change(tmp_path, "experts.2.w1", flip_a_bit)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: .*experts\.gate_up_proj"):
        require_same(mixture, mixture.state_dict(), tmp_path)


def test_a_large_model_with_another_layout_is_compared_by_names_only(
    mixture, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(model_files, "LARGEST_SECOND_MODEL", 1000)
    mixture.save_pretrained(tmp_path)
    change(tmp_path, "experts.2.w1", flip_a_bit)
    with caplog.at_level(logging.WARNING):
        require_same(mixture, mixture.state_dict(), tmp_path)
    assert "names and shapes are checked, values are not" in caplog.text
    change(tmp_path, "lm_head", None)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: lm_head\.weight"):
        require_same(mixture, mixture.state_dict(), tmp_path)


# --- a saved model equals the model in training, for every reader ---------------------------------


IDS = torch.arange(5, 17).view(2, 6)

READER = """
import sys, torch, transformers
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    ".", dtype="auto", output_loading_info=True
)
assert not any(info.values()), info
with torch.no_grad():
    torch.save(model.eval()(input_ids=torch.arange(5, 17).view(2, 6)).logits, "logits.pt")
assert not any(name.startswith("rlhf_pipeline") for name in sys.modules)
"""


@pytest.mark.long
def test_transformers_alone_computes_the_same_logits(world, ppo_inputs, tmp_path):
    """No key is missing or unexpected, and no bit differs, after a step of training in bf16."""
    optimizer = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"}
    deepspeed = {"precision": "bf16", "zero_stage": 3}
    config = TrainedModelConfig.model_validate({"optimizer": optimizer, "deepspeed": deepspeed})
    sft_model = ppo_inputs["sft_model"]
    engine = train_engine(partial(load_policy, sft_model), config, 1)
    engine.backward(network_of(engine.module)(input_ids=IDS).logits.float().square().mean())
    engine.step()
    save_model(engine, load_tokenizer(sft_model), tmp_path / "saved")
    subprocess.run([sys.executable, "-c", READER], check=True, cwd=tmp_path / "saved")
    with torch.no_grad():
        live = network_of(engine.module).eval()(input_ids=IDS).logits
    read = torch.load(tmp_path / "saved" / "logits.pt")
    assert read.dtype == live.dtype and torch.equal(read, live)


def test_a_model_that_is_written_wrongly_keeps_the_earlier_one(ppo_inputs, tmp_path, monkeypatch):
    """One number is the next one that float32 has."""
    model = load_policy(ppo_inputs["sft_model"], "fp32")
    tokenizer, file = load_tokenizer(ppo_inputs["sft_model"]), tmp_path / "model.safetensors"
    save_model(model, tokenizer, tmp_path)
    before, write = file.stat().st_ino, type(model).save_pretrained

    def write_wrongly(self, folder: Path, **kwargs):
        write(self, folder, **kwargs)
        weights = load_file(folder / "model.safetensors")
        norm = weights["model.norm.weight"]
        norm[3] = torch.nextafter(norm[3], torch.tensor(9.0))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", write_wrongly)
    with pytest.raises(ArtifactError, match=rf"{DIFFERS}: model\.norm\.weight"):
        save_model(model, tokenizer, tmp_path)
    assert file.stat().st_ino == before
