"""Where scores come from: each form, in one line or as a block, and what is no such form."""

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.reward_files import reward_faults, source_file
from rlhf_pipeline.config.rewards import CallableReward, ModelReward, TrainedReward, uses_trained

MODEL = {"optimizer": {"learning_rate": 1e-3}}
PPO = {"steps": 4, "rollout_batch_size": 8, "minibatch_size": 8, "micro_batch_size_per_gpu": 4, "actor": MODEL,
       "critic": MODEL}  # fmt: skip


def test_each_form():
    rewards = ["trained", "my.py:f", "package.module:g", {"model": "trained", "name": "again"},
               {"callable": "my.py:h", "weight": -0.5}, {"path": "/models/other", "retokenize": True}]  # fmt: skip
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
    assert (
        PPOConfig.model_validate(config.model_dump(mode="json")) == config
    )  # as it goes through job.json


def test_the_trained_reward_model_alone_is_the_default():
    assert PPOConfig.model_validate(PPO).rewards == (TrainedReward(weight=1.0),)
    assert uses_trained(PPOConfig.model_validate(PPO).rewards)
    assert not uses_trained((CallableReward(callable="my.py:f"),))


@pytest.mark.parametrize(
    ("rewards", "place", "message"),
    [
        ([], (), "no source of rewards; name one, or leave rewards out"),
        (["foo"], (0,), "is no source of rewards: write 'trained', 'FILE.py:FUNCTION', "),
        ([{"weight": 2.0}], (0,), "or a block with one of model, callable and path"),
        ([{"model": "trained", "path": "/x"}], (0, "model", "path"), "Extra inputs are not permitted"),
        ([{"model": "other"}], (0, "model", "model"), "Input should be 'trained'"),
        ([{"callable": "my.py"}], (0, "callable", "callable"), "must be FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        (["my file:f"], (0, "callable", "callable"), "must be FILE.py:FUNCTION"),
        ([{"callable": "my.py:f", "retokenize": True}], (0, "callable", "retokenize"), "Extra inputs are not permitted"),
        ([{"path": "/x", "wait": 1}], (0, "path", "wait"), "Extra inputs are not permitted"),
        ([{"path": "/x", "weight": float("nan")}], (0, "path", "weight"), "finite number"),
        (["a.py:f", "b.py:f"], (), "two sources are called 'f'; give one of them another name"),
        ([{"path": "/models/a b"}], (), "'a b' cannot name a metric; give the source a name of letters"),
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused(rewards, place, message):
    with pytest.raises(ValidationError) as refusal:
        PPOConfig.model_validate(PPO | {"rewards": rewards})
    (fault,) = refusal.value.errors()
    assert fault["loc"] == ("rewards", *place)
    assert message in fault["msg"]


# --- files ----------------------------------------------------------------------------------------


def faults(tmp_path, source: str, function: str = "reward") -> list[str]:
    (tmp_path / "my.py").write_text(source)
    return reward_faults([CallableReward(callable=f"{tmp_path}/my.py:{function}")])


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit  # preflight runs nothing\ndef reward(prompts, responses): ...",
        "from elsewhere import score as reward",
        "reward = make(1)",
        "if True:\n    def reward(prompts, responses): ...",
    ],
)
def test_a_file_that_defines_the_function(tmp_path, source):
    assert faults(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): ...\ndef reword():\n    reward = 1", "my.py does not define reward; its functions are other, reword"),
        ("class A:\n    def reward(self): ...", "does not define reward; its functions are none"),
        ("async def reward(prompts, responses): ...", "does not define reward"),
        ("def reward(:", "is no Python source: invalid syntax"),
    ],
)  # fmt: skip
def test_a_file_that_does_not(tmp_path, source, message):
    (fault,) = faults(tmp_path, source)
    assert fault.startswith(f"ppo.rewards.0: {tmp_path}/my.py:reward: ") and message in fault


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere/my.py:f", "there is no file"),
        ("no_such_package.module:f", "there is no module no_such_package.module; install it"),
        ("statistics.module:f", "there is no module statistics.module"),
        ("itertools:chain", "the module itertools has no Python source file"),
        ("statistics:no_such", "does not define no_such"),
    ],
)
def test_what_is_not_there(place, message):
    (fault,) = reward_faults([TrainedReward(), CallableReward(callable=place)][1:])
    assert message in fault


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    for folder in ("pack", "pack/sub"):
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pack" / "sub" / "mine.py").write_text("def f(prompts, responses): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = CallableReward(callable="pack.sub.mine:f")
    assert source_file(reward) == tmp_path / "pack" / "sub" / "mine.py"
    assert reward_faults([reward]) == []


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        ({}, {}, "is no folder with a model: it has no config.json"),
        ({"config.json": "{}"}, {}, "is no reward model: it has 2 labels, and a score is one"),
        ({"config.json": '{"id2label": {"0": "a"}}'}, {}, "has no token_contract.json, so its tokens may not be"),
        ({"config.json": '{"id2label": {"0": "a"}}'}, {"retokenize": True}, "has no tokenizer"),
        ({"config.json": '{"id2label": {"0": "a"}}', "tokenizer_config.json": ""}, {"retokenize": True}, None),
        ({"config.json": '{"id2label": {"0": "a"}}', "token_contract.json": ""}, {}, None),
    ],
)  # fmt: skip
def test_a_reward_model_s_folder(tmp_path, files, fields, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = reward_faults([ModelReward(path=str(tmp_path), **fields)])
    assert found == [] if message is None else message in found[0]
