"""A training that has learned nothing fails with why; any other says how far it has moved."""

from dataclasses import replace

import pytest
from tiny_jobs import MAIN, STEPS, logged, tiny_job

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.verdict.words import hardly_learned


def rate(learning_rate, **fields):
    start = {"learning_rate": learning_rate, "schedule": "constant", "warmup_fraction": 0.0}
    return {"optimizer": start | fields}


GROUPS = {
    "critic": None, "advantage": "grpo", "responses_per_prompt": 4, "rewards": [{"regex": "$"}],
    "missing_eos_penalty": 0.0, "actor": rate(1e-3),
}  # fmt: skip
"""Every response has the score 1."""
CASES = {"a rate that moves nothing": ("sft", rate(1e-30)), "equal scores": ("ppo", GROUPS)}
FAILURES = {
    "a rate that moves nothing": (
        "sft: found no weight that 2 steps have moved, at rates up to 1e-30, expected something to "
        "learn. Fix: raise sft.optimizer.learning_rate, or lower its warmup_fraction"
    ),
    "equal scores": (
        "ppo.actor: found groups of equal scores alone in all 2 steps, expected something to "
        "learn. Fix: check the rewards, choose prompts that are solved"
    ),
}


def failure_of(job):
    with pytest.raises(StageError) as failure:
        MAIN[job.stage](job)
    return str(failure.value)


def case(lab, stage, fields):
    """The failure of a training, that of one that resumes after its last step, and what is left."""
    job = tiny_job(stage, lab.inputs, lab.folder, fields)
    failures = [failure_of(job), failure_of(replace(job, resume_from=STEPS))]
    return failures, len(logged(lab.folder)), job.export.exists()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_learn_nothing_say_why_also_if_they_resume(cells, name):
    """The checkpoint has the start."""
    failures, lines, is_exported = cells[name]
    assert all(failure.startswith(FAILURES[name]) for failure in failures)
    assert lines == STEPS and not is_exported


@pytest.fixture
def job_of(program_inputs, tmp_path):
    return lambda stage, **fields: tiny_job(stage, program_inputs, tmp_path, fields)


@pytest.fixture
def train(job_of, world):
    return lambda stage, **fields: MAIN[stage](job_of(stage, **fields))


@pytest.mark.parametrize(
    ("zero_stage", "lora"), [(0, None), (1, {"rank": 2}), (3, None), (3, {"rank": 2})]
)
def test_a_training_that_moves_reports_its_losses(train, zero_stage, lora):
    fields = rate(1e-3) | {"deepspeed": {"zero_stage": zero_stage}}
    found = train("sft", lora=lora, **fields)
    assert found["learned/loss_after"] < 0.995 * found["learned/loss_before"]
    assert "learned/taught" not in found and hardly_learned(found) == ""


@pytest.mark.parametrize(
    ("stage", "before"), [("dpo", 0.6931472), ("kto", 0.5), ("reward_model", None), ("sft", None)]
)
def test_a_training_that_hardly_moves_says_so(train, stage, before):
    """At such a rate some weights move by a last digit, and no loss falls: DPO's stays log 2."""
    found = train(stage, **rate(1e-8))
    if before is not None:
        assert found["learned/loss_before"] == pytest.approx(before, rel=1e-6)
    assert found["learned/loss_after"] == pytest.approx(found["learned/loss_before"], rel=1e-3)
    what = f"the loss of its first batch was {found['learned/loss_before']:.3f} and is "
    assert hardly_learned(found).startswith(what)


def test_a_loss_without_a_gradient(job_of, world, tmp_path, monkeypatch):
    """Weight decay moves weights all the same."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flat_loss.py").write_text(
        "def loss(chosen_log_ratios):\n"
        "    return (chosen_log_ratios * 0 + 1).sum(), len(chosen_log_ratios)\n"
    )
    job = job_of("dpo", loss="flat_loss:loss", **rate(1e-3, weight_decay=0.1))
    assert failure_of(job) == (
        "dpo: found gradients of 0 in all 2 steps, expected something to learn. Fix: check whether "
        "scores or answers of a pair differ, and that the loss counts tokens"
    )


def test_a_warmup_in_the_only_step_moves_nothing(job_of, world):
    """Its rate is that of the start of the warm-up, 0."""
    assert failure_of(job_of("sft", epochs=1, **rate(1e-3, warmup_fraction=0.9))) == (
        "sft: found no weight that 1 steps have moved, at rates up to 0, expected something to "
        "learn. Fix: raise sft.optimizer.learning_rate, or lower its warmup_fraction"
    )


def test_training_that_stops_at_the_kl_or_whose_critic_warms_up_has_learned(train):
    """The stop comes after step 2 of 4, and the actor rests in step 1."""
    sizes = {"rollout_batch_size": 8, "micro_batch_tokens": 64, "evaluations": 4}
    found = train("ppo", steps=4, critic_warmup_steps=1, kl={"maximum": 1e-9}, **sizes)
    assert "learned/taught" not in found  # a critic learns from equal scores, too
    assert found["step"] < 4


def test_beside_a_penalty_in_the_reward_equal_scores_teach_nothing_either(job_of, world):
    """The advantages are the noise of the KL, and not 0."""
    failure = failure_of(job_of("ppo", **GROUPS, kl={"coef": 0.1, "place": "reward"}))
    assert failure.startswith(FAILURES["equal scores"])
