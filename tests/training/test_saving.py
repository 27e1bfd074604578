"""A saved model equals the model in training, bit for bit, for every reader."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.forward import network_of
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores

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
