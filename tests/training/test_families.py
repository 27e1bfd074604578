"""One optimizer step of every stage in every model family, on one rank."""

import copy
import math
from functools import partial

import pytest
import torch
from ppo_runs import ppo_config, ppo_setup_of, scored_rollout
from training.by_hand import supervised_setup

from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.engine import train_engine, untrained
from rlhf_pipeline.distributed.engine_state import load_engine, save_engine
from rlhf_pipeline.distributed.model_files import save_model
from rlhf_pipeline.models.loading import load_policy, load_tokenizer
from rlhf_pipeline.models.scalar_head import load_scores, store_score_mean
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.experience import make_experience
from rlhf_pipeline.training.ppo_metrics import rollout_metrics
from rlhf_pipeline.training.ppo_setup import load_ppo_models
from rlhf_pipeline.training.ppo_update import update_models
from rlhf_pipeline.training.reward_model import RewardModelTask
from rlhf_pipeline.training.sft import SFTTask
from rlhf_pipeline.training.supervised import train_step

PROMPTS = [[5, 6, 7], [8], [9, 10]]
LAST_BIAS = (
    "transformer.ln_f.bias",
    "decoder.final_layer_norm.bias",
    "gpt_neox.final_layer_norm.bias",
)
TRAINED = {"optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0}}
SUPERVISED = TRAINED | {"epochs": 1, "batch_size": 3, "micro_batch_tokens": 32}


@pytest.fixture(scope="module")
def checkpoint(make_model, family):
    return make_model(family)


@pytest.fixture(scope="module")
def contract(checkpoint):
    return TokenContract.read(checkpoint)


def moved(before, model):
    """Names of the parameters that have changed."""
    return {
        name for name, value in model.named_parameters() if not torch.equal(before[name], value)
    }


def names(model):
    return {name for name, _ in model.named_parameters()}


def test_sft_moves_every_weight_and_a_resumed_engine_continues_with_the_same_bits(
    checkpoint, contract, world, tmp_path
):
    config = SFTConfig.model_validate(SUPERVISED)
    rows = {"prompt_ids": PROMPTS, "response_ids": [[20, 1], [21, 22, 1], [23]]}
    rows["loss_mask"] = [[True] * len(row) for row in rows["response_ids"]]

    def setup():
        engine = train_engine(partial(load_policy, checkpoint), config, total_steps=3)
        return supervised_setup(engine, SFTTask(contract), config, rows, world)

    whole, resumed = setup(), setup()
    before = copy.deepcopy(whole.engine.module.state_dict())
    metrics = train_step(whole, 1)
    assert metrics["sft/tokens"] == 6 and math.isfinite(metrics["sft/loss"])
    assert moved(before, whole.engine.module) == names(whole.engine.module)
    save_engine(whole.engine, tmp_path)
    load_engine(resumed.engine, tmp_path)
    for step in (2, 3):
        train_step(whole, step)
        train_step(resumed, step)
    expected, found = (each.engine.module.state_dict() for each in (whole, resumed))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_reward_model(checkpoint, contract, world):
    """The first step moves everything but the last bias.

    That bias shifts all scores equally, and the loss depends on differences only.
    """
    config = RewardModelConfig.model_validate(SUPERVISED)
    engine = train_engine(partial(untrained, checkpoint), config, total_steps=1)
    weight = engine.module.head.weight
    assert float(weight.std()) == pytest.approx((weight.shape[1] + 1) ** -0.5, rel=0.4)
    rows = {
        "prompt_ids": PROMPTS,
        "chosen_ids": [[20, 1], [21, 1], [22, 1]],
        "rejected_ids": [[23, 24, 1], [25], [26, 1]],
    }
    setup = supervised_setup(engine, RewardModelTask(contract, config), config, rows, world)
    before = copy.deepcopy(engine.module.state_dict())
    assert math.isfinite(train_step(setup, 1)["reward_model/loss"])
    changed = moved(before, engine.module)
    assert "classifier.score.weight" in changed
    assert all(name.endswith(LAST_BIAS) for name in names(engine.module) - changed)


@pytest.fixture
def reward_model(checkpoint, tmp_path):
    model = load_scores(checkpoint, "fp32", new_head=True)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.classifier.score.weight)
    save_model(model, load_tokenizer(checkpoint), tmp_path / "reward_model")
    store_score_mean(tmp_path / "reward_model", 0.1)
    return tmp_path / "reward_model"


def test_ppo(checkpoint, reward_model, contract, world, tmp_path):
    """Before its first step, the actor equals the reference.

    A ratio of 1 and a KL of 0 show that generation, scoring and training use the same positions
    and the same distribution.
    """
    config = ppo_config(
        steps=1, evaluations=1, rollout_batch_size=3, minibatch_size=3, micro_batch_tokens=32,
        generator="transformers", sampling={"max_response_tokens": 6, "temperature": 0.7},
        actor=TRAINED, critic=TRAINED,
    )  # fmt: skip
    inputs = {"sft_model": checkpoint, "reward_model": reward_model}
    job = LaunchedJob("ppo", "f", 1, {}, inputs, {}, tmp_path, 60.0)
    models = load_ppo_models(job, config, contract, world)
    trained = models.actor.module, models.critic.module
    frozen = models.reference, models.reward_model
    before = [copy.deepcopy(model.state_dict()) for model in (*trained, *frozen)]

    scored = scored_rollout(models, PROMPTS, config, step=1)
    metrics = rollout_metrics(scored, config, world)
    assert metrics["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["objective/kl_k3"] == pytest.approx(0.0, abs=1e-6)
    experience = make_experience(scored, config, kl_coef=0.1, world=world)
    metrics = update_models(ppo_setup_of(models, config, world), experience, 1, 0.1)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(metrics["policy/loss"]) and math.isfinite(metrics["value/loss"])

    changed = [moved(*pair) for pair in zip(before, (*trained, *frozen), strict=True)]
    assert changed == [*map(names, trained), set(), set()]
