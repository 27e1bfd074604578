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
from rlhf_pipeline.models.scalar_head import load_scores
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


def untie(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))


def without_norm(folder, other=None):
    """Remove a weight, or store it once more by another name."""
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        if "model.norm.weight" in stored:
            norm = stored.pop("model.norm.weight")
            more = {} if other is None else {"model.norm.weight": norm, other: norm.clone()}
            save_file(stored | more, path, metadata={"format": "pt"})


def stored(name, how):
    return partial(change, names=[name], how=how)


DAMAGE = {
    "a bit of the first file": (stored("embed_tokens", flip_a_bit), "embed_tokens"),
    "a bit of a later file": (stored("layers.1.mlp.up_proj", flip_a_bit), "layers.1.mlp.up_proj"),
    "a bit of the last file": (stored("model.norm", flip_a_bit), "model.norm"),
    "shape": (stored("model.norm", lambda weight: weight[:-1].clone()), "model.norm"),
    "precision": (stored("model.norm", torch.Tensor.bfloat16), "model.norm"),
    "a weight too few": (without_norm, "model.norm.weight"),
    "a weight too many": (partial(without_norm, other="model.norm.other"), "model.norm.other"),
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


# --- a saved model equals the model in training, for every reader ---------------------------------


IDS = torch.arange(5, 17).view(2, 6)

READER = """
import json, sys, torch, transformers
for kind, folder in json.loads(sys.argv[1]).items():
    auto = getattr(transformers, kind)
    model, info = auto.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(5, 17).view(2, 6)).logits
        torch.save(logits, f"{folder}/logits.pt")
assert not any(name.startswith("rlhf_pipeline") for name in sys.modules)
"""


def trained(load, **deepspeed):
    """An engine after one optimizer step, so that its weights are in no file."""
    config = {
        "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"},
        "deepspeed": deepspeed,
    }
    engine = train_engine(load, TrainedModelConfig.model_validate(config), 1)
    engine.backward(network_of(engine.module)(input_ids=IDS).logits.float().square().mean())
    engine.step()
    return engine


@pytest.mark.long
def test_another_process_computes_the_same_logits_with_transformers_alone(
    world, ppo_inputs, tmp_path
):
    """No key is missing or unexpected, and no bit differs."""
    sft_model, reward_model = ppo_inputs["sft_model"], ppo_inputs["reward_model"]
    engines = {
        "AutoModelForCausalLM": trained(
            partial(load_policy, sft_model), precision="bf16", zero_stage=3
        ),
        "AutoModelForSequenceClassification": trained(partial(load_scores, reward_model)),
    }
    for kind, engine in engines.items():
        save_model(engine, load_tokenizer(sft_model), tmp_path / kind)
    folders = json.dumps({kind: str(tmp_path / kind) for kind in engines})
    subprocess.run([sys.executable, "-c", READER, folders], check=True, cwd=tmp_path)
    for kind, engine in engines.items():
        with torch.no_grad():
            live = network_of(engine.module).eval()(input_ids=IDS).logits
        read = torch.load(tmp_path / kind / "logits.pt")
        assert read.dtype == live.dtype and torch.equal(read, live)
    start = load_scores(reward_model, "fp32").classifier(input_ids=IDS).logits
    assert not torch.allclose(read, start, rtol=1e-2)  # training has changed it
    scores = engines["AutoModelForSequenceClassification"].module(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), scores_to_keep=1
    )
    torch.testing.assert_close(read, scores, rtol=1e-5, atol=1e-6)  # the scores that PPO uses


def test_a_model_that_is_written_wrongly_fails_and_keeps_the_earlier_one(
    ppo_inputs, tmp_path, monkeypatch
):
    """One number is the next one that float32 has."""
    model, tokenizer = (
        load_policy(ppo_inputs["sft_model"], "fp32"),
        load_tokenizer(ppo_inputs["sft_model"]),
    )
    save_model(model, tokenizer, tmp_path / "saved")
    before = (tmp_path / "saved" / "model.safetensors").stat().st_ino
    write = type(model).save_pretrained

    def write_wrongly(self, folder: Path, **kwargs):
        write(self, folder, **kwargs)
        weights = load_file(folder / "model.safetensors")
        norm = weights["model.norm.weight"]
        norm[3] = torch.nextafter(norm[3], torch.tensor(9.0))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", write_wrongly)
    differs = r"the saved model differs from the model in memory: model\.norm\.weight"
    with pytest.raises(ArtifactError, match=differs):
        save_model(model, tokenizer, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_ino == before
