"""Training that diverges ends in the step that shows it and keeps the best model."""

import json
import math
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import DPOConfig, RewardModelConfig, SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import Rows
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.distributed.optimizer_step import grad_norm
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.models.loading import freeze, load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.pipelines.ppo import SPEC as PPO
from rlhf_pipeline.pipelines.sft import SPEC as SFT
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import StageRunner
from rlhf_pipeline.training import ppo
from rlhf_pipeline.training.best_models import BestModels
from rlhf_pipeline.training.divergence import DivergenceGuard, stability_advice
from rlhf_pipeline.training.dpo import DPOTask
from rlhf_pipeline.training.ppo_setup import set_up
from rlhf_pipeline.training.resume import Checkpoints
from rlhf_pipeline.training.reward_model import RewardModelTask
from rlhf_pipeline.training.rollout_faults import rollout_fault
from rlhf_pipeline.training.sft import SFTTask
from rlhf_pipeline.training.supervised import Setup, fit

PROMPTS = [[5 + i] * (1 + i % 3) for i in range(16)]
ANSWERS = [[20 + i, 21 + i, 1] for i in range(16)]
TABLE = pa.table(
    {
        "id": [str(i) for i in range(16)], "prompt_ids": PROMPTS,
        "chosen_ids": ANSWERS, "rejected_ids": ANSWERS[::-1],
        "response_ids": ANSWERS, "loss_mask": [[True] * 3] * 16,
        "source": ["files"] * 16, "messages": [[{"role": "user", "content": "?"}]] * 16,
    }
)  # fmt: skip
"""Rows for every stage: four steps of four rows."""

WILD = 1e30
"""A learning rate that makes weights of 1e30: their first product overflows float32."""


def model(learning_rate: float = 1e-3, warmup: float = 0.0, **optimizer) -> dict:
    """Settings of a trained model; with a warm-up, the first step has learning rate 0."""
    settings = {"learning_rate": learning_rate, "warmup_fraction": warmup, "schedule": "constant"}
    return {"optimizer": settings | optimizer}


def supervised(**changes) -> dict:
    return {"epochs": 1, "batch_size": 4, "micro_batch_tokens": 32, "evaluations": 1} | changes


def ppo_config(**changes) -> PPOConfig:
    fields = {
        "steps": 3, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_tokens": 64,
        "evaluations": 3, "evaluation_prompts": 8, "sampling": {"max_response_tokens": 6},
        "actor": model(), "critic": model(),
    }  # fmt: skip
    return PPOConfig.model_validate(fields | changes)


def artifact(folder: Path) -> Path:
    """Add a manifest, as a finished stage does."""
    Manifest("test", "f", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture(scope="module")
def policy(make_model):
    return artifact(make_model("llama", seed=1))


@pytest.fixture(scope="module")
def rows(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    TokenContract.read(policy).write(folder)
    for name in ("train", "validation"):
        with (
            pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, TABLE.schema) as writer,
        ):
            writer.write_table(TABLE)
    return artifact(folder)


@pytest.fixture(scope="module")
def make_reward_model(policy, tmp_path_factory):
    """Makes reward models with head weights of a given scale."""

    def make(scale: float = 1.0) -> Path:
        torch.manual_seed(5)
        scores = load_scores(policy, "fp32", new_head=True)
        torch.nn.init.normal_(scores.classifier.score.weight).data.mul_(scale)
        folder = tmp_path_factory.mktemp("scores") / "reward_model"
        save_model(scores, load_tokenizer(policy), folder)
        store_score_mean(folder, 0.0)
        return artifact(folder)

    return make


@pytest.fixture(scope="module")
def reward_model(make_reward_model):
    return make_reward_model()


@pytest.fixture(scope="module")
def mute(policy, tmp_path_factory):
    """An SFT model that answers everything with EOS.

    All embeddings share one large coordinate, and the head maps it to EOS.
    """
    ender = load_policy(policy, "fp32")
    with torch.no_grad():
        ender.model.embed_tokens.weight[:, 0] = 1e3
        ender.lm_head.weight.zero_()
        ender.lm_head.weight[TokenContract.read(policy).eos_id, 0] = 1e3
    folder = tmp_path_factory.mktemp("mute") / "sft_model"
    save_model(ender, load_tokenizer(policy), folder)
    return artifact(folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fit_stage(stage, folder, world, policy, config_fields, damage=None):
    """Run a supervised stage on `TABLE`; `damage` changes its initial model."""
    contract = TokenContract.read(policy)

    def load(precision):
        start = (
            load_scores(policy, precision, new_head=True)
            if stage == "reward_model"
            else load_policy(policy, precision)
        )
        if damage is not None:
            damage(start)
        return start

    task, block = {
        "sft": lambda: (SFTTask(contract), SFTConfig),
        "reward_model": lambda: (RewardModelTask(contract), RewardModelConfig),
        "dpo": lambda: (
            DPOTask(contract, freeze(load_policy(policy, "fp32")), 0.1, 0.0),
            DPOConfig,
        ),
    }[stage]()
    config = block.model_validate(config_fields)
    engine = train_engine(load, config, 4)
    job = LaunchedJob(stage, "f", 1, {}, {}, {}, folder, 60.0)
    best = BestModels(job, world, load_tokenizer(policy), config, partial(load_policy, policy))
    writer = MetricsFile(job.metrics_file, 4)
    advice = stability_advice(f"{stage}.", config)
    setup = Setup(
        engine=engine,
        task=task,
        config=config,
        training=Rows.of(TABLE),
        validation=Rows.of(TABLE),
        world=world,
        seed=1,
        best=best,
        guard=DivergenceGuard(world, writer, best, lambda metric: advice),
        checkpoints=Checkpoints(job.checkpoints, world, {stage: engine}, keep=2),
        done=0,
    )
    fit(setup)
    return best


def train_ppo(folder, world, policy, reward_model, rows, config):
    inputs = {"prompts": rows, "sft_model": policy, "reward_model": reward_model}
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, folder, 60.0)
    setup = set_up(job, config, TokenContract.read(policy), world)
    ppo.train(setup)
    return setup.best["validation"]


@pytest.mark.parametrize("stage", ["sft", "reward_model", "dpo"])
def test_a_step_that_is_not_logged_ends_the_stage_too(stage, world, policy, tmp_path):
    """The first update does the damage, the second step shows it, the fourth would be logged."""
    with pytest.raises(StageError) as failure:
        fit_stage(stage, tmp_path, world, policy, supervised(**model(WILD), log_every=100))
    shown, _, rest = str(failure.value).partition(" at step 2: ")
    # The first number that overflows.
    assert shown in (f"{stage}/loss is nan", "optim/grad_norm is inf")
    assert rest == (
        f"training has diverged. Fix: lower {stage}.optimizer.learning_rate (1e+30) or "
        f"{stage}.optimizer.max_grad_norm (1); {stage}.deepspeed.precision is fp32 already. "
        "No model was evaluated, so none is kept."
    )
    (line,) = lines(tmp_path)
    assert line["step"] == 2 and str(line["metrics"][shown.split()[0]]) == shown.split()[-1]
    assert not (tmp_path / "checkpoints").exists()


def test_the_advice_mentions_a_half_precision(world, policy, tmp_path):
    bf16 = supervised(**model(WILD), deepspeed={"precision": "bf16"})
    with pytest.raises(StageError, match=r"sft\.deepspeed\.precision \(bf16\) may be too narrow"):
        fit_stage("sft", tmp_path, world, policy, bf16)


def test_a_model_whose_evaluation_is_not_finite_is_not_the_best(world, policy, tmp_path):
    """The first step has learning rate 0; the update of the second breaks the model."""
    config = supervised(**model(WILD, warmup=0.25), evaluations=4)
    with pytest.raises(StageError) as failure:
        fit_stage("sft", tmp_path, world, policy, config)
    assert "validation/loss is nan at step 2: training has diverged. Fix: " in str(failure.value)
    assert str(failure.value).endswith(
        f"The best model, of step 1, is kept in {tmp_path}/checkpoints/best-00000001."
    )
    assert math.isfinite(lines(tmp_path)[-1]["metrics"]["sft/loss"])
    assert_equal_weights(tmp_path / "checkpoints" / "best-00000001", policy)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_gradient_that_overflows_is_a_divergence(world, policy, tmp_path, zero_stage):
    """With a head of 1e24, losses are finite and squared gradients are not.

    DeepSpeed skips the step without a message.
    """
    config = supervised(**model(), deepspeed={"zero_stage": zero_stage})
    with pytest.raises(
        StageError,
        match=r"optim/grad_norm is inf at step 1: .* or the initial model is damaged\. Fix: ",
    ):
        fit_stage(
            "sft",
            tmp_path,
            world,
            policy,
            config,
            lambda model: model.lm_head.weight.data.mul_(1e24),
        )
    assert math.isfinite(lines(tmp_path)[0]["metrics"]["sft/loss"])


def test_an_overflow_in_an_earlier_update_of_a_step_is_reported(world, policy):
    """PPO takes several optimizer steps before its metrics are checked."""
    config = SFTConfig.model_validate(supervised(**model()))
    engine = train_engine(partial(load_policy, policy), config, 3)
    norms = []
    for factor in (1.0, math.inf, 1.0):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.tensor([[5, 6]])).logits.logsumexp(-1).sum() * factor)
        engine.step()
        norms.append(float(grad_norm(engine)))
    assert 0 < norms[0] < math.inf and norms[1:] == [math.inf, math.inf]


def test_sound_training_reports_its_gradient_norm(world, policy, tmp_path):
    best = fit_stage("sft", tmp_path, world, policy, supervised(**model()))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert all(line["metrics"]["optim/grad_norm"] > 0 for line in lines(tmp_path))
    assert best.best.step == 4


def test_a_damaged_reward_model_is_reported(world, policy, make_reward_model, rows, tmp_path):
    with pytest.raises(StageError) as failure:
        train_ppo(tmp_path, world, policy, make_reward_model(math.inf), rows, ppo_config())
    assert (
        "objective/score is nan at step 1: training has diverged, or the initial model is damaged. "
        "Fix: check the reward model and ppo.reward_model.deepspeed.precision (fp32)"
    ) in str(failure.value)


def test_a_broken_actor_ends_the_step_with_a_bound_on_the_kl(
    world, policy, reward_model, rows, tmp_path
):
    """The first update breaks the actor, the second rollout shows it, the third is evaluated."""
    config = ppo_config(actor=model(WILD), evaluations=1, log_every=100)
    with pytest.raises(StageError) as failure:
        train_ppo(tmp_path, world, policy, reward_model, rows, config)
    message = str(failure.value)
    assert "objective/kl: found nan nats per response at step 2, expected at most " in message
    assert "ppo.kl.explosion (100)" in message
    assert (
        "Fix: lower ppo.actor.optimizer.learning_rate (1e+30) or "
        "ppo.actor.optimizer.max_grad_norm (1); ppo.actor.deepspeed.precision is fp32 already, "
        "or raise ppo.kl.coef (0.1)"
    ) in message
    assert [line["step"] for line in lines(tmp_path)] == [2]


def test_a_broken_actor_ends_the_step_without_a_bound_on_the_kl(
    world, policy, reward_model, rows, tmp_path
):
    config = ppo_config(actor=model(WILD), evaluations=1, kl={"explosion": None})
    with pytest.raises(
        StageError,
        match=r"objective/kl is nan at step 2: training has diverged\. Fix: lower ppo\.actor\.",
    ):
        train_ppo(tmp_path, world, policy, reward_model, rows, config)


def test_a_kl_between_maximum_and_explosion_ends_training_without_an_error(
    world, policy, reward_model, rows, tmp_path
):
    """The KL of the second rollout exceeds the maximum."""
    bounds = {"coef": 0.0, "maximum": 1e-3, "explosion": 100.0}
    config = ppo_config(steps=3, actor=model(3e-2, warmup=0.34), kl=bounds, missing_eos_penalty=0.0)
    best = train_ppo(tmp_path, world, policy, reward_model, rows, config)
    assert 1e-3 < lines(tmp_path)[-1]["metrics"]["objective/kl"] < 100.0
    assert best.best.step == 1


def test_an_actor_that_its_evaluation_shows_broken_is_not_exported(
    world, policy, reward_model, rows, tmp_path
):
    """The last update breaks the actor; only the evaluation after it can show that."""
    config = ppo_config(steps=1, evaluations=1, actor=model(WILD))
    with pytest.raises(
        StageError,
        match="objective/kl: found nan nats per response on held-out prompts after step 1, expec",
    ):
        train_ppo(tmp_path, world, policy, reward_model, rows, config)
    (line,) = lines(tmp_path)
    assert math.isnan(line["metrics"]["validation/kl"])
    assert math.isfinite(line["metrics"]["objective/kl"])
    assert not (tmp_path / "checkpoints").exists()


def test_empty_responses_are_a_fault_and_short_ones_are_not():
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


def test_equal_returns_are_not_a_fault(world, policy, reward_model, rows, tmp_path):
    """Beside a penalty of 1e9, float32 has no digit for a score: no variance to explain."""
    wordy = load_policy(policy, "fp32")
    wordy.model.embed_tokens.weight.data[:, 0] = 1e3
    wordy.lm_head.weight.data[TokenContract.read(policy).eos_id, 0] = -1e3
    folder = tmp_path / "sft_model"
    save_model(wordy, load_tokenizer(policy), folder)
    config = ppo_config(steps=1, evaluations=1, lam=1.0, kl={"coef": 0.0}, missing_eos_penalty=1e9)
    train_ppo(tmp_path, world, folder, reward_model, rows, config)
    (line,) = lines(tmp_path)
    assert line["metrics"]["rollout/eos_fraction"] == 0.0
    assert "value/explained_variance" not in line["metrics"]
    assert "value/mean" in line["metrics"]


# Whole stages: two ranks under the launcher.


def launch(spec, config, inputs: dict[str, Path], folder: Path) -> tuple[str, Path]:
    """The message of a stage that must fail on two ranks, and its work directory."""
    runner = StageRunner(RunContext(folder, LaunchConfig(processes=2, collective_timeout_s=600.0)))
    with pytest.raises(StageError) as failure:
        runner.run(Job(spec, {spec.name: config}, inputs, 1))
    (work,) = (folder / spec.name).iterdir()
    assert str(failure.value).startswith(f"stage {spec.name} failed after ")
    assert "Traceback" not in str(failure.value)
    assert not (work / "export").exists()
    return str(failure.value), work


def assert_equal_weights(folder: Path, expected: Path) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    weights = AutoModelForCausalLM.from_pretrained(expected).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    assert load_tokenizer(folder).chat_template


@pytest.mark.long
def test_sft_that_diverges(policy, rows, tmp_path):
    """Step 1 has learning rate 0 and is evaluated, step 2 breaks the model, step 3 shows it."""
    fields = supervised(**model(WILD, warmup=0.25), evaluations=3, log_every=100)
    inputs = {"demonstrations": rows, "base_model": policy}
    message, work = launch(SFT, SFTConfig.model_validate(fields), inputs, tmp_path)
    assert (
        "sft/loss is nan at step 3: training has diverged. Fix: lower sft.optimizer.learning_rate "
        "(1e+30) or sft."
    ) in message
    best = work / "checkpoints" / "best-00000001"
    assert f"The best model, of step 1, is kept in {best}." in message
    assert [line["step"] for line in lines(work)] == [1, 3]
    assert_equal_weights(best, policy)


@pytest.mark.long
def test_ppo_whose_critic_diverges(policy, reward_model, rows, tmp_path):
    """The second update breaks the critic; the actor has not yet trained on its values."""
    config = ppo_config(critic=model(WILD, warmup=0.34))
    inputs = {"prompts": rows, "sft_model": policy, "reward_model": reward_model}
    message, work = launch(PPO, config, inputs, tmp_path)
    assert (
        "value/mean is nan at step 3: training has diverged. Fix: lower "
        "ppo.critic.optimizer.learning_rate (1e+30) or "
    ) in message
    assert [line["step"] for line in lines(work)] == [1, 2, 3]
    scores = [line["metrics"]["validation/rlhf_reward"] for line in lines(work)[:2]]
    step = 1 if scores[0] >= scores[1] else 2
    best = work / "checkpoints" / f"best-0000000{step}"
    assert f"The best model, of step {step}, is kept in {best}." in message
    kept = AutoModelForCausalLM.from_pretrained(best)
    assert all(value.isfinite().all() for value in kept.state_dict().values())


@pytest.mark.long
def test_an_exploding_kl(policy, reward_model, rows, tmp_path):
    """Step 2 changes weights of 0.2 by 1 each; the rollout of step 3 exceeds both bounds."""
    bounds = {"maximum": 1.0, "explosion": 5.0}
    config = ppo_config(actor=model(1.0, warmup=0.34), kl=bounds, evaluations=1)
    inputs = {"prompts": rows, "sft_model": policy, "reward_model": reward_model}
    message, work = launch(PPO, config, inputs, tmp_path)
    last = lines(work)[-1]
    kl = last["metrics"]["objective/kl"]
    assert last["step"] == 3 and 5.0 < kl < math.inf
    assert f"objective/kl: found {kl:.4g} nats per response at step 3, expected at mo" in message
    assert "ppo.kl.explosion (5)" in message
    assert "ppo.actor.optimizer.learning_rate (1)" in message and "ppo.kl.coef (0.1)" in message


@pytest.mark.long
def test_only_empty_responses(mute, reward_model, rows, tmp_path):
    inputs = {"prompts": rows, "sft_model": mute, "reward_model": reward_model}
    message, work = launch(PPO, ppo_config(), inputs, tmp_path)
    assert (
        "every response is empty at step 1: the SFT model ends at once. Fix: check its "
        "demonstrations, and whether the chat template ends a prompt with EOS"
    ) in message
    assert message.count("No model was evaluated, so none is kept.") == 1
    (line,) = lines(work)
    assert line["metrics"]["rollout/response_tokens"] == 1.0
    assert line["metrics"]["rollout/eos_fraction"] == 1.0
