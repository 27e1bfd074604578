"""Training that diverges ends in the step that shows it and keeps the best model."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from ppo_runs import ppo_config
from rank_fixtures import as_artifact
from safetensors.torch import load_file, save_file
from tiny_jobs import MAIN, logged, tiny_job
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.distributed.optimizer_step import grad_norm
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.training.ppo_metrics import rollout_fault

SUPERVISED = {"batch_size": 4, "evaluations": 1}
WILD = 1e30
"""A learning rate that makes weights of 1e30: their first product overflows float32."""


def model(learning_rate=1e-3, warmup=0.0):
    """Settings of a trained model; with a warm-up, the first step has learning rate 0."""
    optimizer = {"learning_rate": learning_rate, "warmup_fraction": warmup, "schedule": "constant"}
    return {"optimizer": optimizer}


def ppo_fields(**changes):
    fields = {"steps": 3, "evaluations": 3, "evaluation_prompts": 8, "micro_batch_tokens": 64}
    fields |= {"sampling": {"max_response_tokens": 6}}
    return fields | {"actor": model(), "critic": model()} | changes


@pytest.fixture(scope="module")
def make_policy(make_model, tmp_path_factory):
    """Makes a policy, changed by a function."""

    def make(change=None):
        policy = make_model("llama", seed=1)
        if change is not None:
            changed, folder = load_policy(policy, "fp32"), tmp_path_factory.mktemp("policy") / "p"
            with torch.no_grad():
                change(changed, TokenContract.read(policy).eos_id)
            save_model(changed, load_tokenizer(policy), folder)
            policy = folder
        return as_artifact(policy)

    return make


@pytest.fixture
def run(program_inputs, world, tmp_path):
    """Runs a program; returns its failure, if any, and the lines of its metrics.

    `models` replace inputs. Supervised training takes four steps, KTO more.
    """

    def train(stage, models=None, **fields):
        fields = ppo_fields(**fields) if stage == "ppo" else SUPERVISED | fields
        job, failure = tiny_job(stage, program_inputs | (models or {}), tmp_path, fields), ""
        try:
            MAIN[stage](job)
        except StageError as error:
            failure = str(error)
        return failure, [json.loads(line) for line in job.metrics_file.read_text().splitlines()]

    return train


@pytest.mark.parametrize("stage", ["sft", "reward_model", "kto"])
def test_a_step_that_is_not_logged_ends_the_stage_too(run, stage, tmp_path):
    """The first update does the damage, the second step shows it, the fourth would be logged."""
    failure, (line,) = run(stage, **model(WILD), log_every=100)
    shown, _, rest = failure.partition(" at step 2: ")
    # The first number that overflows.
    assert shown in (f"{stage}/loss is nan", "optim/grad_norm is inf")
    assert rest == (
        f"training has diverged. Fix: lower {stage}.optimizer.learning_rate (1e+30) or "
        f"{stage}.optimizer.max_grad_norm (1); {stage}.deepspeed.precision is fp32 already. "
        "No model was evaluated, so none is kept."
    )
    assert line["step"] == 2 and str(line["metrics"][shown.split()[0]]) == shown.split()[-1]
    assert not (tmp_path / "checkpoints").exists()


def test_the_advice_mentions_a_half_precision(run):
    failure, _ = run("sft", **model(WILD), deepspeed={"precision": "bf16"})
    assert "sft.deepspeed.precision (bf16) may be too narrow" in failure


def test_a_model_whose_evaluation_is_not_finite_is_not_the_best(run, make_policy, tmp_path):
    """The first step has learning rate 0; the update of the second breaks the model."""
    failure, lines = run("sft", **model(WILD, warmup=0.25), evaluations=4)
    assert "validation/loss is nan at step 2: training has diverged. Fix: " in failure
    best = tmp_path / "checkpoints" / "best-00000001"
    assert failure.endswith(f"The best model, of step 1, is kept in {best}.")
    assert math.isfinite(lines[-1]["metrics"]["sft/loss"])
    kept, info = AutoModelForCausalLM.from_pretrained(best, output_loading_info=True)
    assert not any(info.values()) and load_tokenizer(best).chat_template
    start = load_policy(make_policy(), "fp32").state_dict()
    assert all(torch.equal(value, start[name]) for name, value in kept.state_dict().items())


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_gradient_that_overflows_is_a_divergence(run, make_policy, zero_stage):
    """With a head of 1e24, losses are finite and squared gradients are not.

    DeepSpeed skips the step without a message.
    """
    damaged = make_policy(lambda policy, eos: policy.lm_head.weight.mul_(1e24))
    deepspeed = {"zero_stage": zero_stage}
    failure, lines = run("sft", {"base_model": damaged}, **model(), deepspeed=deepspeed)
    assert failure.startswith("optim/grad_norm is inf at step 1: ")
    assert " or the initial model is damaged. Fix: " in failure
    assert math.isfinite(lines[0]["metrics"]["sft/loss"])


def test_an_overflow_in_an_earlier_update_of_a_step_is_reported(world, make_policy):
    """PPO takes several optimizer steps before its metrics are checked."""
    fields = {"batch_size": 4, "epochs": 1, "micro_batch_tokens": 32} | model()
    engine = train_engine(partial(load_policy, make_policy()), SFTConfig.model_validate(fields), 3)
    norms = []
    for factor in (1.0, math.inf, 1.0):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.tensor([[5, 6]])).logits.logsumexp(-1).sum() * factor)
        engine.step()
        norms.append(float(grad_norm(engine)))
    assert 0 < norms[0] < math.inf and norms[1:] == [math.inf, math.inf]


def test_a_damaged_reward_model_is_reported(run, program_inputs, tmp_path):
    damaged = shutil.copytree(program_inputs["reward_model"], tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["score.weight"] *= math.inf
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    failure, _ = run("ppo", {"reward_model": damaged})
    assert (
        "objective/score is nan at step 1: training has diverged, or the initial model is damaged. "
        "Fix: check the reward model and ppo.reward_model.deepspeed.precision (fp32)"
    ) in failure


@pytest.mark.parametrize("bound", [100.0, None])
def test_a_broken_actor_ends_the_step(run, bound):
    """The first update breaks the actor, the second rollout shows it, the third is evaluated."""
    kl = {"explosion": bound}
    failure, lines = run("ppo", actor=model(WILD), evaluations=1, log_every=100, kl=kl)
    expected = (
        "objective/kl: found nan nats per response at step 2, expected at most ppo.kl.explosion "
        "(100). The actor is too far from the reference. "
        if bound
        else "objective/kl is nan at step 2: training has diverged. "
    )
    assert failure.startswith(
        f"{expected}Fix: lower ppo.actor.optimizer.learning_rate (1e+30) or "
        "ppo.actor.optimizer.max_grad_norm (1); ppo.actor.deepspeed.precision is fp32 already, "
        "or raise ppo.kl.coef (0.1)"
    )
    assert [line["step"] for line in lines] == [2]


def test_an_exploding_kl(run):
    """Step 2 changes weights of 0.2 by 1 each; the rollout of step 3 exceeds both bounds."""
    bounds = {"maximum": 1.0, "explosion": 5.0}
    failure, lines = run("ppo", actor=model(1.0, warmup=0.34), kl=bounds, evaluations=1)
    kl = lines[-1]["metrics"]["objective/kl"]
    assert lines[-1]["step"] == 3 and 5.0 < kl < math.inf
    assert f"objective/kl: found {kl:.4g} nats per response at step 3, expected at mo" in failure


def test_an_actor_that_its_evaluation_shows_broken_is_not_exported(run, tmp_path):
    """The last update breaks the actor; only the evaluation after it can show that."""
    failure, (line,) = run("ppo", steps=1, evaluations=1, actor=model(WILD))
    where = "on held-out prompts after step 1, expec"
    assert f"objective/kl: found nan nats per response {where}" in failure
    assert math.isnan(line["metrics"]["validation/kl"])
    assert math.isfinite(line["metrics"]["objective/kl"])
    assert not (tmp_path / "checkpoints").exists()


def test_empty_responses_are_a_fault_and_short_ones_are_not(run, make_policy):
    rollout = {"objective/kl": 0.0, "rollout/response_tokens": 1.0, "rollout/eos_fraction": 1.0}
    config = ppo_config(kl={"coef": 0.25})
    learned = rollout_fault(rollout, config, "at step 7", trained=True)
    assert learned.startswith(
        "every response is empty at step 7: the actor has learned to end at once because "
        "ppo.rewards prefers that. "
    )
    assert "raise ppo.kl.coef (0.25)" in learned
    # One response of eight has a token before its EOS.
    one_word = rollout | {"rollout/response_tokens": 1.125}
    assert rollout_fault(one_word, config, "at step 7", trained=True) is None
    nothing = rollout | {"rollout/response_tokens": 0.0, "rollout/eos_fraction": 0.0}
    assert rollout_fault(nothing, config, "at step 7", trained=True) is not None

    def mute(policy, eos):
        """All embeddings share one large coordinate, and the head maps it to EOS."""
        policy.model.embed_tokens.weight[:, 0] = 1e3
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[eos, 0] = 1e3

    failure, _ = run("ppo", {"sft_model": make_policy(mute)})
    assert failure.startswith(
        "every response is empty at step 1: the SFT model ends at once. Fix: check its "
        "demonstrations, and whether the chat template ends a prompt with EOS"
    )


def test_equal_returns_are_not_a_fault(run, make_policy):
    """Beside a penalty of 1e9, float32 has no digit for a score: no variance to explain."""

    def wordy(policy, eos):
        policy.model.embed_tokens.weight[:, 0] = 1e3
        policy.lm_head.weight[eos, 0] = -1e3

    changes = {"lam": 1.0, "kl": {"coef": 0.0}, "missing_eos_penalty": 1e9, "steps": 1}
    failure, (line,) = run("ppo", {"sft_model": make_policy(wordy)}, evaluations=1, **changes)
    # Without a digit for a score, there is nothing to learn, either: that is said at the end.
    assert failure.startswith("ppo.actor: found gradients of 0 in all 1 steps, ")
    assert line["metrics"]["rollout/eos_fraction"] == 0.0
    assert "value/explained_variance" not in line["metrics"]
    assert "value/mean" in line["metrics"]


CASES = {"two ranks": ()}


def case(lab):
    """The failure of a critic that the second update breaks."""
    fields = ppo_fields(critic=model(WILD, warmup=0.34))
    with pytest.raises(StageError) as failure:
        MAIN["ppo"](tiny_job("ppo", lab.inputs, lab.folder, fields))
    return str(failure.value), str(lab.folder)


def test_two_ranks_whose_critic_diverges(cells):
    """The actor has not yet trained on its values."""
    message, folder = cells["two ranks"]
    shown = "value/mean is nan at step 3: training has diverged. Fix: lower ppo.critic."
    assert message.startswith(shown)
    work = Path(folder)
    scores = [line["validation/rlhf_reward"] for line in logged(work)[:2]]
    best = work / "checkpoints" / f"best-0000000{1 if scores[0] >= scores[1] else 2}"
    assert len(logged(work)) == 3
    assert f"is kept in {best}." in message and not (work / "export").exists()
    kept = AutoModelForCausalLM.from_pretrained(best)
    assert all(value.isfinite().all() for value in kept.state_dict().values())
