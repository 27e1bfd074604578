"""LoRA in DeepSpeed's engines: the weights that train, and the exports, on the ranks of the lab."""

import copy
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from peft import PeftModel
from rank_fixtures import as_artifact
from safetensors.torch import load_file
from tiny_jobs import MAIN, logged, tiny_job
from training.by_hand import supervised_setup

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.lora import WithoutAdapters
from rlhf_pipeline.models.scalar_head import load_scores
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.checkpoints import BestModels
from rlhf_pipeline.training.sft import SFTTask
from rlhf_pipeline.training.supervised import train_step

LORA = {"rank": 4, "alpha": 8.0}
MODEL = {"optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0}, "lora": LORA}
ROWS = {
    "prompt_ids": [[5, 6, 7], [8], [9, 10], [11]],
    "response_ids": [[20, 1], [21, 22, 1], [23, 1], [24, 25, 1]],
}
ROWS["loss_mask"] = [[True] * len(row) for row in ROWS["response_ids"]]
IDS = torch.tensor([[5, 6, 7, 20, 1]])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
ZERO_3 = {"deepspeed": {"zero_stage": 3}}
CHECKPOINTED = {"gradient_checkpointing": True}
CASES = {  # program, parameters, precision
    "sft": ("sft", MODEL | {"deepspeed": {"zero_stage": 2}}, "fp32"),
    "sft in bf16": (
        "sft", MODEL | CHECKPOINTED | {"deepspeed": {"zero_stage": 3, "precision": "bf16"}}, "bf16"
    ),
    "rest": ("sft", MODEL | ZERO_3 | {"lora": LORA | {"train_rest": True}}, "fp32"),
    "reward_model": ("reward_model", MODEL | ZERO_3, "fp32"),
    "ppo": (
        "ppo",
        {
            "ema": {"decay": 0.5}, "actor": MODEL | ZERO_3 | CHECKPOINTED,
            "critic": MODEL | {"deepspeed": {"zero_stage": 2}},
        },
        "fp32",
    ),
}  # fmt: skip


def output(model, program):
    """The scores or logits of a model in any wrapper."""
    with torch.no_grad():
        if program == "reward_model":
            return model(**INPUTS, scores_to_keep=5).float().clone()
        return model(**INPUTS).logits.float().clone()


def distance(one, other):
    return float((one - other).abs().max())


def case(lab, program, changes, precision):
    """Train; then compare engine, export, and the model that training started from."""
    finish, live = BestModels.finish, {}

    def watched(self):
        engine = watched.engines[self.export]
        live[self.export.name] = {
            "trained": output(engine, program),
            "start": output(WithoutAdapters(engine), program),
            "weights": whole_state_dict(engine.module),
        }
        return finish(self)

    offer, watched.engines = BestModels.offer, {}

    def offered(self, model, *arguments):
        watched.engines[self.export] = model
        offer(self, model, *arguments)

    with patch.object(BestModels, "finish", watched), patch.object(BestModels, "offer", offered):
        MAIN[program](tiny_job(program, lab.inputs, lab.folder, changes))
    lab.world.barrier()
    if lab.world.rank:
        return None
    export, found = lab.folder / "export", live["export"]
    source = lab.inputs["base_model" if program == "sft" else "sft_model"]
    start = load_policy(source, precision).state_dict()
    own = {
        name.removeprefix("classifier.").replace(".base_layer.", "."): value
        for name, value in found["weights"].items()
    }
    adapters = {name: value for name, value in found["weights"].items() if ".lora_B." in name}
    read = load_scores if program == "reward_model" else load_policy
    model = read(export, precision)
    (best, *_) = sorted((lab.folder / "checkpoints").glob("best-*"))
    result = {
        # A reward model has no lm_head.
        "changed": sorted(
            n for n, x in start.items() if n in own and not torch.equal(own[n].cpu(), x)
        ),
        "adapters": [bool(value.any()) for value in adapters.values()],
        "learned": distance(found["trained"], found["start"]),
        "export": distance(output(model, program), found["trained"]),
        "dtypes": sorted({str(x.dtype) for x in load_file(export / "model.safetensors").values()}),
        "kept": sorted(path.name for path in best.iterdir() if path.name != "README.md"),
        "engines": sorted(json.loads((lab.folder / "deepspeed.json").read_text())),
        "trained without": sorted(n for n in start if n in found["weights"]),
    }
    if program != "reward_model":  # its head has trained, and is not part of an adapter
        result["start"] = distance(output(load_policy(source, precision), program), found["start"])
    if program == "ppo":
        average = output(load_policy(export / "ema", precision), program)
        result["average"] = distance(average, live["ema"]["trained"])
        result["of average"] = distance(average, found["trained"])
    if (folder := export / "adapter").exists():
        result |= by_peft(folder, source, program, found["weights"], precision)
    return result


def by_peft(folder: Path, source: Path, program: str, weights, precision) -> dict:
    """Where the adapter says its base is, and the weights that peft reads otherwise."""
    auto, how = transformers.AutoModelForCausalLM, {}
    if program == "reward_model":
        auto, how = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    base = auto.from_pretrained(source, dtype=dtype, **how)
    read = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).state_dict()
    names = {
        name: name.removeprefix("classifier.").replace("score.", "score.modules_to_save.default.")
        for name in weights
    }
    return {
        "base": json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"],
        "different": [
            name for name, own in names.items()
            if not torch.equal(read[f"base_model.model.{own}"], weights[name].cpu())
        ],
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_export_is_the_trained_model_and_its_adapter_alone_has_changed(cells, name):
    program, _, precision = CASES[name]
    found = cells[name]
    assert found["learned"] > 1e-2
    # In bf16 the export rounds the sum of matrix and adapter to 8 bits.
    assert found["export"] <= (1e-5 if precision == "fp32" else 0.1)
    assert found["dtypes"] == ["torch.bfloat16" if precision == "bf16" else "torch.float32"]
    # Two layers of seven matrices; B starts at zero.
    assert found["adapters"] == [True] * 14
    if name == "rest":  # all weights without adapters train, and the adapter alone says too little
        assert found["changed"] == [n for n in found["trained without"] if "base_layer" not in n]
        assert "base" not in found
    else:
        assert found["changed"] == [] and found.get("start", 0) == 0
        assert found["kept"] == ["adapter_config.json", "adapter_model.safetensors"]
        assert found["different"] == []
        assert found["base"] == ("base_model" if program == "sft" else "sft_model")


@pytest.mark.long
def test_ppo_averages_adapters_and_has_no_engine_for_the_reference(cells):
    """A separate reference would have one, as the actor is sharded; the reward model is whole."""
    found = cells["ppo"]
    assert found["engines"] == ["actor", "critic"]
    assert found["average"] <= 1e-5 and found["of average"] > 1e-3


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom"])
@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (2, "bf16")])
def test_sft_changes_adapters_alone_in_every_family(
    make_model, program_inputs, world, tmp_path, family, zero_stage, precision
):
    inputs = program_inputs | {"base_model": as_artifact(make_model(family))}
    lab = SimpleNamespace(world=world, inputs=inputs, folder=tmp_path)
    deepspeed = {"zero_stage": zero_stage, "precision": precision}
    found = case(lab, "sft", MODEL | {"deepspeed": deepspeed}, precision)
    assert found["changed"] == found["different"] == [] and found["start"] == 0
    assert all(found["adapters"]) and found["learned"] > 0


def test_the_reward_model_trains_adapters_alone_beside_its_head(program_inputs, world, tmp_path):
    lab = SimpleNamespace(world=world, inputs=program_inputs, folder=tmp_path)
    found = case(lab, "reward_model", MODEL, "fp32")
    assert found["changed"] == found["different"] == [] and all(found["adapters"])


def test_dpo_starts_at_log_2_and_its_reference_does_not_change(program_inputs, world, tmp_path):
    changes = MODEL | {"deepspeed": {"zero_stage": 2}}
    MAIN["dpo"](tiny_job("dpo", program_inputs, tmp_path, changes))
    first, second = logged(tmp_path)
    assert first["dpo/loss"] == pytest.approx(0.6931472, rel=1e-6) and second["dpo/loss"] < 0.69


def test_ppo_trains_adapters_and_the_head_of_the_critic(train_ppo, ppo_inputs):
    actor, critic = (MODEL | {"deepspeed": {"zero_stage": stage}} for stage in (1, 2))
    run = train_ppo(actor=actor, critic=critic)
    assert isinstance(run.setup.models.reference, WithoutAdapters)
    first, second = (line["objective/kl_k3"] for line in run.lines)
    assert first == 0 < second
    before, after = run.start["critic"], run.weights("critic")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".lora_" in name or "score" in name}
    start = load_policy(ppo_inputs["sft_model"], "fp32")(**INPUTS).logits
    assert torch.equal(run.setup.models.reference(**INPUTS).logits, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="4-bit weights need a GPU")
def test_adapters_trained_on_a_4_bit_base_are_merged_into_the_whole_base(make_model, on_ranks):
    pytest.importorskip("bitsandbytes", reason="the extra `quantization` is not installed")
    checkpoint = make_model("llama")
    results = on_ranks(__file__, checkpoint, ranks=1, accelerator="cuda")
    weights = load_file(results / "export" / "model.safetensors")
    start = load_policy(checkpoint, "bf16").state_dict()
    assert weights.keys() <= start.keys()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def train_quantized(checkpoint: Path, folder: Path) -> None:
    """Train adapters on a 4-bit base for one step, and export the model."""
    world = join(0, timeout_s=600)
    supervised = {"epochs": 2, "batch_size": 4, "micro_batch_tokens": 32, "evaluations": 1}
    quantized = {"deepspeed": {"precision": "bf16"}, "lora": LORA | {"quantize": "nf4"}}
    config = SFTConfig.model_validate(MODEL | supervised | quantized)
    read = partial(load_policy, checkpoint)
    engine = train_engine(read, config, 1)
    module = engine.module
    assert module.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8
    before = copy.deepcopy(module.state_dict())
    task = SFTTask(TokenContract.read(checkpoint))
    train_step(supervised_setup(engine, task, config, ROWS, world), 1)
    after = module.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(before[name], value)}
    assert changed == {name for name in after if ".lora_B." in name}
    job = LaunchedJob("sft", "f", 1, {}, {"base_model": checkpoint}, {}, folder, 600.0)
    best = BestModels(job, world, load_tokenizer(checkpoint), config, read)
    best.offer(engine, 1, 1.0, {})
    best.finish()


if __name__ == "__main__":
    train_quantized(Path(json.loads(sys.argv[1])), Path(sys.argv[2]))
