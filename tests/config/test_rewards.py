"""Reward sources: the forms in one line and as a block."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, TrainedReward, uses_trained

MODEL = {"optimizer": {"learning_rate": 1e-3}}
PPO = {
    "steps": 4,
    "rollout_batch_size": 8,
    "minibatch_size": 8,
    "micro_batch_tokens": 4,
    "actor": MODEL,
    "critic": MODEL,
}

EXTRA = "Extra inputs are not permitted"


def test_each_form():
    rewards = [
        "trained",
        "my.py:f",
        "package.module:g",
        {"model": "trained", "name": "again"},
        {"callable": "my.py:h", "weight": -0.5},
        {"path": "/models/other", "retokenize": True},
    ]
    config = PPOConfig.model_validate(PPO | {"rewards": rewards})
    assert config.rewards == (
        TrainedReward(),
        CallableReward(callable="my.py:f"),
        CallableReward(callable="package.module:g"),
        TrainedReward(name="again"),
        CallableReward(callable="my.py:h", weight=-0.5),
        ModelReward(path="/models/other", retokenize=True),
    )
    assert [reward.label for reward in config.rewards] == [
        "trained",
        "f",
        "g",
        "again",
        "h",
        "other",
    ]
    # The round trip through job.json.
    assert PPOConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_trained_reward_model_alone_is_the_default():
    assert PPOConfig.model_validate(PPO).rewards == (TrainedReward(weight=1.0),)
    assert uses_trained(PPOConfig.model_validate(PPO).rewards)
    assert not uses_trained((CallableReward(callable="my.py:f"),))


@pytest.mark.parametrize(
    ("rewards", "place", "message"),
    [
        ([], (), "found no reward source, expected at least one. Fix: add one, or remove rewards"),
        (["foo"], (0,), "expected 'trained', 'FILE.py:FUNCTION', "),
        ([{"weight": 2.0}], (0,), "or a block with one of model, callable, path, reference, reg"),
        ([{"model": "trained", "path": "/x"}], (0, "model", "path"), EXTRA),
        ([{"model": "other"}], (0, "model", "model"), "Input should be 'trained'"),
        ([{"callable": "my.py"}], (0, "callable", "callable"),
         "expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        (["my file:f"], (0, "callable", "callable"), "expected FILE.py:FUNCTION"),
        ([{"callable": "my.py:f", "retokenize": True}], (0, "callable", "retokenize"), EXTRA),
        ([{"path": "/x", "wait": 1}], (0, "path", "wait"), EXTRA),
        ([{"path": "/x", "weight": float("nan")}], (0, "path", "weight"), "finite number"),
        (["a.py:f", "b.py:f"], (),
         "found two sources called 'f', expected unique names. Fix: set name"),
        ([{"path": "/models/a b"}], (), "found label 'a b', expected letters, digits, "),
    ],
)  # fmt: skip
def test_other_forms_are_refused(rewards, place, message):
    with pytest.raises(ValidationError) as refusal:
        PPOConfig.model_validate(PPO | {"rewards": rewards})
    (fault,) = refusal.value.errors()
    assert fault["loc"] == ("rewards", *place)
    assert message in fault["msg"]
