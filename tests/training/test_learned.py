"""A training that has learned nothing fails with why; any other says how far it has moved."""

import json
from functools import cache

import pyarrow as pa
import pytest
import torch
from rank_fixtures import as_artifact, write_table
from tiny_jobs import MAIN, tiny_job

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.pipelines.ppo import GRPO
from rlhf_pipeline.pipelines.supervised import SFT
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.stages.job import Job, RunContext
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.training import ppo
from rlhf_pipeline.verdict.words import hardly_learned

ANSWERS = [[20 + i, 21 + i, 1] for i in range(16)]


TABLE = pa.table(
    {
        "id": [str(i) for i in range(16)], "prompt_ids": [[5 + i] for i in range(16)],
        "chosen_ids": ANSWERS, "rejected_ids": ANSWERS[::-1],
        "response_ids": ANSWERS, "loss_mask": [[True] * 3] * 16, "label": [True, False] * 8,
        "source": ["files"] * 16, "messages": [[{"role": "user", "content": "?"}]] * 16,
        "reference": pa.nulls(16, pa.string()),
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def make_inputs(make_model, tmp_path_factory):
    """Makes the inputs of all programs."""

    @cache
    def make():
        policy = as_artifact(make_model("llama", seed=1))
        rows = write_table(TABLE, tmp_path_factory.mktemp("rows"), TokenContract.read(policy))
        torch.manual_seed(5)
        scores = load_scores(policy, "fp32", new_head=True)
        reward_model = tmp_path_factory.mktemp("scores") / "reward_model"
        save_model(scores, load_tokenizer(policy), reward_model)
        store_score_mean(reward_model, 0.0)
        names = ("demonstrations", "comparisons", "labelled", "prompts")
        models = {"base_model": policy, "sft_model": policy}
        return models | dict.fromkeys(names, rows) | {"reward_model": as_artifact(reward_model)}

    return make


def rate(learning_rate, **fields):
    return {"optimizer": {"learning_rate": learning_rate, "schedule": "constant"} | fields}


FEW = {"batch_size": 4, "epochs": 1, "evaluations": 1}


@pytest.fixture
def train(make_inputs, world, tmp_path):
    def run(stage, **fields):
        fields = (FEW if stage in ("sft", "reward_model", "dpo", "kto") else {}) | fields
        return MAIN[stage](tiny_job(stage, make_inputs(), tmp_path, fields))

    return run


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_training_that_moves_reports_its_losses(train, zero_stage, lora):
    fields = rate(1e-3, warmup_fraction=0.0) | {"deepspeed": {"zero_stage": zero_stage}}
    found = train("sft", lora=lora, **fields)
    assert found["learned/loss_after"] < 0.995 * found["learned/loss_before"]
    assert "learned/taught" not in found and hardly_learned(found) == ""


@pytest.mark.parametrize(
    ("stage", "before"),
    [("dpo", 0.6931472), ("kto", 0.5), ("reward_model", None), ("sft", None)],
)
def test_a_training_that_hardly_moves_says_so(train, stage, before):
    """At such a rate some weights move by a last digit, and no loss falls: DPO's stays log 2."""
    found = train(stage, **rate(1e-8, warmup_fraction=0.0))
    if before is not None:
        assert found["learned/loss_before"] == pytest.approx(before, rel=1e-6)
    assert found["learned/loss_after"] == pytest.approx(found["learned/loss_before"], rel=1e-3)
    what = f"the loss of its first batch was {found['learned/loss_before']:.3f} and is "
    assert hardly_learned(found).startswith(what)


def test_a_loss_without_a_gradient(train, tmp_path, monkeypatch):
    """Weight decay moves weights all the same."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flat_loss.py").write_text(
        "def loss(chosen_log_ratios):\n"
        "    return (chosen_log_ratios * 0 + 1).sum(), len(chosen_log_ratios)\n"
    )
    with pytest.raises(StageError) as failure:
        train("dpo", loss="flat_loss:loss", **rate(1e-3, warmup_fraction=0.0, weight_decay=0.1))
    assert str(failure.value) == (
        "dpo: found gradients of 0 in all 4 steps, expected something to learn. Fix: check whether "
        "scores or answers of a pair differ, and that the loss counts tokens"
    )


def test_a_warmup_in_the_only_step_moves_nothing(train):
    """Its rate is that of the start of the warm-up, 0."""
    fields = rate(1e-3, warmup_fraction=0.9) | {"batch_size": 16}
    with pytest.raises(StageError) as failure:
        train("sft", **fields)
    assert str(failure.value) == (
        "sft: found no weight that 1 steps have moved, at rates up to 0, expected something to "
        "learn. Fix: raise sft.optimizer.learning_rate, or lower its warmup_fraction"
    )


def test_training_that_stops_at_the_kl_or_whose_critic_warms_up_has_learned(train):
    """The stop comes after step 2 of 4, and the actor rests in step 1."""
    sizes = {"rollout_batch_size": 8, "micro_batch_tokens": 64, "evaluations": 4}
    found = train("ppo", steps=4, critic_warmup_steps=1, kl={"maximum": 1e-9}, **sizes)
    assert "learned/taught" not in found  # a critic learns from equal scores, too
    assert found["step"] < 4


GROUPS = {
    "steps": 2, "rollout_batch_size": 8, "responses_per_prompt": 4, "micro_batch_tokens": 64,
    "evaluations": 1, "evaluation_prompts": 4, "sampling": {"max_response_tokens": 6},
    "actor": rate(1e-3, warmup_fraction=0.0),
}  # fmt: skip


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_groups_of_equal_scores_teach_nothing(make_inputs, world, tmp_path, monkeypatch, place):
    """Beside a penalty in the reward, the advantages are the noise of the KL, and not 0."""
    (tmp_path / "equal.py").write_text(
        "def reward(prompts, responses):\n    return [0.5] * len(responses)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"rewards": ["equal:reward"], "kl": {"coef": 0.1, "place": place}}
    config = GRPOConfig.model_validate(GROUPS | changes)
    inputs = {name: make_inputs()[name] for name in ("prompts", "sft_model")}
    inputs |= {"rewards.0": tmp_path / "equal.py"}
    blocks = {"grpo": config.model_dump(mode="json")}
    job = LaunchedJob("grpo", "f", 1, blocks, inputs, {}, tmp_path, 60.0)
    with pytest.raises(StageError) as failure:
        ppo.main(job)
    assert str(failure.value).startswith(
        "grpo.actor: found groups of equal scores alone in all 2 steps, "
    )


def stage_failure(spec, blocks, inputs, folder):
    """The message of a real launch, which fails."""
    launch = LaunchConfig(processes=2, collective_timeout_s=600.0)
    runner = StageRunner(RunContext(folder, launch))
    with pytest.raises(StageError) as failure:
        runner.run(Job(spec, blocks, inputs, 1))
    assert "Traceback" not in str(failure.value)
    return str(failure.value)


def test_a_rate_that_moves_nothing_on_two_ranks(make_inputs, tmp_path):
    """Resumed after its last step, the stage says the same: the checkpoint has its start."""
    config = SFTConfig.model_validate(FEW | rate(1e-30, warmup_fraction=0.0))
    inputs = {name: make_inputs()[name] for name in ("base_model", "demonstrations")}
    for _ in range(2):
        found = stage_failure(SFT, {"sft": config}, inputs, tmp_path)
        assert (
            "sft: found no weight that 4 steps have moved, at rates up to 1e-30, expected "
            "something to learn. Fix: raise sft.optimizer.learning_rate, or lower"
        ) in found
    (work,) = (tmp_path / "sft").iterdir()
    lines = [json.loads(line)["step"] for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4] and not (work / "export").exists()


def test_equal_rewards_on_two_ranks(make_inputs, tmp_path, monkeypatch):
    (tmp_path / "equal_rewards.py").write_text(
        "def reward(prompts, responses):\n    return [0.5] * len(responses)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = GRPOConfig.model_validate(GROUPS | {"rewards": ["equal_rewards:reward"]})
    inputs = {name: make_inputs()[name] for name in ("prompts", "sft_model")}
    inputs |= {"rewards.0": tmp_path / "equal_rewards.py"}
    assert (
        "grpo.actor: found groups of equal scores alone in all 2 steps, "
        "expected something to learn. Fix: check the rewards, choose prompts that are solved"
    ) in stage_failure(GRPO, {"grpo": config}, inputs, tmp_path / "workspace")
