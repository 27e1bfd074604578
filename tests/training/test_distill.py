"""On-policy distillation in this process: the student moves to its teacher, also with LoRA."""

import pytest
import torch
from ppo_runs import run_ppo
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pipeline.config.distill import DistillConfig

SMALL = {
    "steps": 40, "rollout_batch_size": 32, "minibatch_size": 32, "micro_batch_tokens": 512,
    "evaluations": 2, "sampling": {"max_response_tokens": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(make_model):
    """A larger model that prefers some tokens to others, whatever the context is."""
    folder = make_model("llama", seed=5, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = model.get_input_embeddings().weight.data
    inputs[:] = inputs[0]
    print(model.lm_head.weight.std(), model.config.tie_word_embeddings)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lr", [3e-3, 1e-2, 3e-2])
@pytest.mark.parametrize("lora", [None, {}])
def test_x(teacher, ppo_inputs, world, tmp_path, lr, lora):
    model = {"optimizer": {"learning_rate": lr, "warmup_fraction": 0.0, "schedule": "constant"}, "lora": lora}
    config = DistillConfig.model_validate({"teacher": str(teacher), "actor": model} | SMALL)
    inputs = {name: ppo_inputs[name] for name in ("prompts", "sft_model")} | {"teacher": teacher}
    run = run_ppo(config, inputs, world, tmp_path)
    print(lr, lora, [(round(l["objective/kl"], 2), round(l["policy/entropy"], 2), l["rollout/response_tokens"]) for l in run.lines[::8]])
    print([l["validation/kl"] for l in run.lines if "validation/kl" in l])
