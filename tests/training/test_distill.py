"""On-policy distillation in this process: the student moves to its teacher."""

import json

import pytest
import torch
from ppo_runs import run_ppo
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.ppo_setup import set_up

SMALL = {
    "rollout_batch_size": 32, "minibatch_size": 32, "micro_batch_tokens": 512,
    "responses_per_prompt": 2, "evaluations": 1, "sampling": {"max_response_tokens": 8},
}  # fmt: skip
MODEL = {"optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"}}


@pytest.fixture(scope="module")
def teacher(make_model):
    """A larger model that prefers some tokens to others, whatever the context is."""
    folder = make_model("llama", seed=5, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = model.get_input_embeddings().weight.data
    inputs[:] = inputs[0]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("lora", "steps", "share"), [(None, 24, 0.3), ({"rank": 8}, 32, 0.7)])
def test_the_student_moves_to_its_teacher(teacher, ppo_inputs, world, tmp_path, lora, steps, share):
    """With LoRA, the reference is still the teacher, not the student without its adapters."""
    given = {"teacher": str(teacher), "actor": MODEL | {"lora": lora}, "steps": steps}
    config = DistillConfig.model_validate(SMALL | given)
    inputs = {name: ppo_inputs[name] for name in ("prompts", "sft_model")} | {"teacher": teacher}
    run = run_ppo(config, inputs, world, tmp_path)
    first, last = run.lines[0], run.lines[-1]
    assert first["objective/kl"] > 4
    assert last["validation/kl"] < share * first["objective/kl"]
    assert last["validation/rlhf_reward"] == -last["validation/kl"]
    shown = {name for line in run.lines for name in line}
    of_rewards = {"score", "shaped_score", "clipped_fraction", "equal_groups"}
    assert not {name for name in shown if name.rpartition("/")[2] in of_rewards}
    loaded, frozen = load_policy(teacher, "fp32").state_dict(), run.weights("reference")
    assert all(torch.equal(frozen[name], weight) for name, weight in loaded.items())


def test_a_resumed_distillation_equals_an_uninterrupted_one(teacher, ppo_inputs, world, tmp_path):
    given = {"teacher": str(teacher), "actor": MODEL, "steps": 3, "checkpoint_every": 1}
    config = DistillConfig.model_validate(SMALL | given | {"keep_last": 3})
    inputs = {name: ppo_inputs[name] for name in ("prompts", "sft_model")} | {"teacher": teacher}
    whole = run_ppo(config, inputs, world, tmp_path)
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, tmp_path, 60.0, resume_from=1)
    resumed = set_up(job, config, whole.setup.models.contract, world)
    ppo.train(resumed)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    metrics = [line["metrics"] for line in lines][-2:]
    for before, after in zip(whole.lines[1:], metrics, strict=True):
        shown = {name for name in before if not name.startswith("time/")}
        assert {name: after[name] for name in shown} == {name: before[name] for name in shown}
