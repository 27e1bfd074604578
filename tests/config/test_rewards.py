"""Reward sources: the forms in one line and as a block."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.rewards import (
    CallableReward,
    ChatConfig,
    CodeReward,
    ModelReward,
    RegexReward,
    RubricReward,
    TrainedReward,
    uses_trained,
)

MODEL = {"optimizer": {"learning_rate": 1e-3}}
PPO = {
    "steps": 4,
    "rollout_batch_size": 8,
    "minibatch_size": 8,
    "micro_batch_tokens": 4,
    "actor": MODEL,
    "critic": MODEL,
}

CHAT = {"base_url": "http://here/v1", "model": "org/judge-1"}
EXTRA = "Extra inputs are not permitted"


def test_each_form():
    rewards = [
        "trained",
        "my.py:f",
        "package.module:g",
        {"model": "trained", "name": "again"},
        {"callable": "my.py:h", "weight": -0.5},
        {"path": "/models/other", "retokenize": True},
        {"regex": "^Yes"},
        {"rubric": "Short.", "openai": CHAT, "scale": 5},
        {"code": "python", "timeout_s": 2},
    ]
    config = PPOConfig.model_validate(PPO | {"rewards": rewards})
    assert config.rewards == (
        TrainedReward(),
        CallableReward(callable="my.py:f"),
        CallableReward(callable="package.module:g"),
        TrainedReward(name="again"),
        CallableReward(callable="my.py:h", weight=-0.5),
        ModelReward(path="/models/other", retokenize=True),
        RegexReward(regex="^Yes"),
        RubricReward(rubric="Short.", openai=ChatConfig(**CHAT), scale=5.0),
        CodeReward(code="python", timeout_s=2.0),
    )
    assert [reward.label for reward in config.rewards] == [
        "trained",
        "f",
        "g",
        "again",
        "h",
        "other",
        "regex",
        "judge-1",
        "code",
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
        ([{"callable": "my.py:f", "timeout_s": 5}], (0, "callable"),
         "timeout_s: found 5, which needs processes of its own. Fix: set processes to 1 or more"),
        ([{"code": "perl"}], (0, "code", "code"), "Input should be 'python'"),
        ([{"code": "python", "memory_mib": 8}], (0, "code", "memory_mib"), "equal to 64"),
        ([{"path": "/x", "wait": 1}], (0, "path", "wait"), EXTRA),
        ([{"path": "/x", "weight": float("nan")}], (0, "path", "weight"), "finite number"),
        ([{"regex": "yes|(no"}], (0, "regex"),
         "found 'yes|(no', expected a regular expression: missing ) at position 7"),
        ([{"openai": CHAT}], (0,), "beside openai, add a rubric"),
        ([{"rubric": "Short."}], (0, "rubric", "openai"), "Field required"),
        ([{"rubric": "Short.", "openai": CHAT | {"template": "{prompt} {first} {second}"}}],
         (0, "rubric"), "openai.template: found a text, expected none: the rubric is the question"),
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


def test_the_processes_of_a_function_are_no_part_of_the_recipe():
    isolated = CallableReward(callable="my.py:f", processes=2, timeout_s=9)
    assert isolated.recipe() == CallableReward(callable="my.py:f").recipe()
    limits = CodeReward(code="python", processes=9)
    assert limits.recipe() == CodeReward(code="python").recipe()
    assert limits.recipe() != CodeReward(code="python", timeout_s=9).recipe()
