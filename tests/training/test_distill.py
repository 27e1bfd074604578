"""On-policy distillation: its gradient by hand, and the student that moves to its teacher."""

from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from ppo_runs import run_ppo
from tiny_jobs import logged
from training.by_hand import Descent, log_distributions, token_logprobs
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows, micro_batches
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Experience
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.models.sequences import collate
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.ppo_setup import set_up
from rlhf_pipeline.training.ppo_update import demonstrations, update_minibatch
from rlhf_pipeline.training.prompts import FurtherRows

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


@pytest.fixture(scope="module")
def inputs(ppo_inputs, teacher):
    return {name: ppo_inputs[name] for name in ("prompts", "sft_model")} | {"teacher": teacher}


def config_of(teacher, **changes) -> DistillConfig:
    return DistillConfig.model_validate(SMALL | {"teacher": str(teacher), "actor": MODEL} | changes)


def setup_of(config, inputs, world, folder, **job):
    launched = LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0, **job)
    return set_up(launched, config, TokenContract.read(inputs["sft_model"]), world)


@pytest.mark.parametrize(("lora", "steps", "share"), [(None, 24, 0.3), ({"rank": 8}, 32, 0.7)])
def test_the_student_moves_to_its_teacher(teacher, inputs, world, tmp_path, lora, steps, share):
    """With LoRA, the reference is still the teacher, not the student without its adapters."""
    config = config_of(teacher, actor=MODEL | {"lora": lora}, steps=steps)
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


def test_a_resumed_distillation_equals_an_uninterrupted_one(teacher, inputs, world, tmp_path):
    config = config_of(teacher, steps=3, checkpoint_every=1, keep_last=3)
    run_ppo(config, inputs, world, tmp_path)
    whole = logged(tmp_path)
    ppo.train(setup_of(config, inputs, world, tmp_path, resume_from=1))
    assert logged(tmp_path) == whole and len(whole) == 3


PROMPTS = [[5, 6, 7], [10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 1], [21, 22, 23, 1], [25], [26, 27, 1]]
GIVEN = {
    "prompt_ids": [[5, 6], [7, 8, 9]],
    "response_ids": [[30, 31, 32, 1], [33, 34]],
    "loss_mask": [[True, False, True, True], [True, True]],  # 31 is of a user
}
OWN, ALL = 2 + 4 + 1 + 3, 2 + 4 + 1 + 3 + 3 + 2  # tokens


def reverse_kls(student, teacher, prompt, response):
    s, t = (log_distributions(model, prompt, response, 0.7) for model in (student, teacher))
    return (s.exp() * (s - t.detach())).sum(-1)


@pytest.mark.parametrize(
    ("ranks", "tokens", "stage"), [(1, 99, 0), (1, 1, 1), (2, 24, 2), (2, 99, 0)]
)
def test_the_gradient_is_that_of_the_mean_kl_of_own_and_given_answers(
    teacher, inputs, world, tmp_path, on_threads, ranks, tokens, stage
):
    """By one step of plain gradient descent, row by row without padding, coefficient 3."""
    actor = {"optimizer": {"learning_rate": 1.0, "max_grad_norm": 1e9}}
    config = config_of(
        teacher, kl={"coef": 3.0}, given_batch_size=2, sampling={"temperature": 0.7},
        actor=actor | {"deepspeed": {"zero_stage": stage}}, micro_batch_tokens=tokens,
    )  # fmt: skip
    setup = setup_of(config, inputs, world, tmp_path)
    students = [load_policy(inputs["sft_model"], "fp32") for _ in range(ranks)]
    descent = Descent(students, config.actor)

    def step(world):
        own = slice(world.rank, None, ranks)
        # Each rank has its own teacher, as each process does.
        reference = freeze(load_policy(teacher, "fp32"))
        models = replace(setup.models, actor=descent.engines[world.rank], reference=reference)
        own_setup = replace(setup, models=models, world=world)
        sequences = collate(PROMPTS[own], RESPONSES[own], 0)
        old = torch.zeros(sequences.response_ids.shape)
        rows = Experience(sequences, old, old, sampler_logprobs=old)
        (groups,) = micro_batches([sequences.lengths], tokens, models.actor, world)
        pieces = [rows.rows(index) for index in groups]
        given = FurtherRows(Rows.of(pa.table(GIVEN)), 2, 1, config, world, 1).batch(0)
        pieces += demonstrations(given, own_setup)
        sums = update_minibatch(own_setup, pieces, {}, kl_coef=3.0, train_actor=True)
        return world.sums(sums)

    sums, *_ = on_threads(ranks, step)
    student, known = (load_policy(inputs["sft_model"], "fp32"), load_policy(teacher, "fp32"))
    pairs = list(zip(PROMPTS, RESPONSES, strict=True))
    own = sum(reverse_kls(student, known, *pair).sum() for pair in pairs)
    others = 0
    for prompt, response, mask in zip(*GIVEN.values(), strict=True):
        others += reverse_kls(student, known, prompt, response)[torch.tensor(mask)].sum()
    gradients = torch.autograd.grad(3 * (own + others) / ALL, list(student.parameters()))
    for found, gradient in zip(descent.gradients().values(), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)
    assert (sums["policy/count"], sums["given/count"], sums["objective/count"]) == (OWN, 5, 4)
    assert sums["policy/loss"] == pytest.approx(3 * own.item(), rel=1e-5)
    assert sums["given/loss"] == pytest.approx(3 * others.item(), rel=1e-5)
    of_teacher = sum(token_logprobs(known, *pair, 0.7).sum().item() for pair in pairs)
    assert sums["objective/kl"] == pytest.approx(0 - of_teacher, rel=1e-5)


def test_a_kl_beyond_its_bound_ends_the_training(teacher, inputs, world, tmp_path):
    config = config_of(teacher, steps=2, kl={"explosion": 1.0})
    with pytest.raises(StageError, match=r"nats per response at step 1, expected at most distill"):
        run_ppo(config, inputs, world, tmp_path)
