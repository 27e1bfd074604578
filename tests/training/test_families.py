"""A first optimizer step of every stage, in every family of models, on one rank with a real DeepSpeed engine."""

import copy
import math
from functools import partial

import pytest
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.models.loading import load_policy, load_scores, load_tokenizer
from rlhf_pipeline.models.scalar_head import store_score_mean
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.experience import make_experience
from rlhf_pipeline.training.ppo import roll_out, rollout_metrics
from rlhf_pipeline.training.ppo_models import load_ppo_models
from rlhf_pipeline.training.ppo_update import learn
from rlhf_pipeline.training.reward_model import RewardModelTask, untrained
from rlhf_pipeline.training.sft import SFTTask
from rlhf_pipeline.training.supervised import train_step

PROMPTS = [[5, 6, 7], [8], [9, 10]]
LAST_BIAS = (
    "transformer.ln_f.bias",
    "decoder.final_layer_norm.bias",
    "gpt_neox.final_layer_norm.bias",
)
TRAINED = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0}}
SUPERVISED = TRAINED | {"epochs": 1, "batch_size": 3, "micro_batch_size_per_gpu": 2}


@pytest.fixture(scope="module")
def checkpoint(make_model, family):
    return make_model(family)


@pytest.fixture(scope="module")
def contract(checkpoint):
    return TokenContract.read(checkpoint)


def moved(before, model):
    """Names of the parameters that are not what they were."""
    return {
        name for name, value in model.named_parameters() if not torch.equal(before[name], value)
    }


def names(model):
    return {name for name, _ in model.named_parameters()}


def test_sft(checkpoint, contract, world):
    engine = train_engine(
        partial(load_policy, checkpoint), SFTConfig.model_validate(SUPERVISED), total_steps=1
    )
    before = copy.deepcopy(engine.module.state_dict())
    task = SFTTask(contract)
    responses = [[20, 1], [21, 22, 1], [23]]
    batch = task.collate(
        {
            "prompt_ids": PROMPTS,
            "response_ids": responses,
            "loss_mask": [[True] * len(row) for row in responses],
        }
    )
    sums = world.sums(train_step(engine, world, task, batch, task.weight(batch), 2))
    assert sums["tokens"] == 6 and math.isfinite(sums["nll"])
    assert moved(before, engine.module) == names(engine.module)


def test_reward_model(checkpoint, contract, world):
    """The head starts at zero, so the first gradient stops there. The second reaches everything but the last bias, which
    shifts all scores alike: a comparison does not see it."""
    engine = train_engine(
        partial(untrained, checkpoint), RewardModelConfig.model_validate(SUPERVISED), total_steps=2
    )
    task = RewardModelTask(contract)
    batch = task.collate(
        {
            "prompt_ids": PROMPTS,
            "chosen_ids": [[20, 1], [21, 1], [22, 1]],
            "rejected_ids": [[23, 24, 1], [25], [26, 1]],
        }
    )
    changes = []
    for _ in range(2):
        before = copy.deepcopy(engine.module.state_dict())
        sums = world.sums(train_step(engine, world, task, batch, task.weight(batch), 2))
        assert sums["pairs"] == 3 and math.isfinite(sums["nll"])
        changes.append(moved(before, engine.module))
    assert changes[0] == {"classifier.score.weight"}
    assert all(name.endswith(LAST_BIAS) for name in names(engine.module) - changes[1])


@pytest.fixture
def reward_model(checkpoint, tmp_path):
    model = load_scores(checkpoint, "fp32", new_head=True)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.classifier.score.weight)
    save_model(model, load_tokenizer(checkpoint), tmp_path / "reward_model")
    store_score_mean(tmp_path / "reward_model", 0.1)
    return tmp_path / "reward_model"


def test_ppo(checkpoint, reward_model, contract, world, tmp_path):
    """The actor is the reference until it moves: ratio 1 and KL 0 show that generation, scoring and training see the same
    positions and the same distribution."""
    config = PPOConfig.model_validate(
        {
            "steps": 1, "rollout_batch_size": 3, "minibatch_size": 3, "micro_batch_size_per_gpu": 2,
            "evaluations": 1, "sampling": {"max_response_tokens": 6, "temperature": 0.7},
            "actor": TRAINED, "critic": TRAINED,
        }
    )  # fmt: skip
    inputs = {"sft_model": checkpoint, "reward_model": reward_model}
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, tmp_path, 60.0)
    models = load_ppo_models(job, config, contract, world)
    trained, frozen = (
        (models.actor.module, models.critic.module),
        (models.reference, models.reward_model),
    )
    before = [copy.deepcopy(model.state_dict()) for model in (*trained, *frozen)]

    scored = roll_out(models, {"prompt_ids": PROMPTS}, config, seed=1, step=1, slots=range(3))
    metrics = rollout_metrics(scored, 0.1, world)
    assert metrics["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["objective/kl_k3"] == pytest.approx(0.0, abs=1e-6)
    experience = make_experience(scored, config, kl_coef=0.1, score_mean=0.1, world=world)
    stats = learn(models, experience, config, world, train_actor=True)
    assert stats["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert stats["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(stats["policy/loss"]) and math.isfinite(stats["value/loss"])

    changed = [moved(*pair) for pair in zip(before, (*trained, *frozen), strict=True)]
    assert changed == [names(trained[0]), names(trained[1]), set(), set()]
