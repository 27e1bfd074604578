"""Rewards are part of the recipe by their bytes, in any folder."""

import json

from rlhf_pipeline.config.rewards import CallableReward, ModelReward, TrainedReward
from rlhf_pipeline.pipelines.ppo import reward_inputs
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries


def digests(*rewards):
    paths, identities = reward_inputs(rewards)
    return {name: content_digest(path) for name, path in paths.items()} | identities


def test_the_trained_reward_model_adds_nothing():
    assert digests(TrainedReward()) == {}


def test_the_source_of_a_function_is_an_input(tmp_path, monkeypatch):
    file = tmp_path / "my_rewards.py"
    file.write_text("def f(prompts, responses): return [0.0 for _ in responses]")
    monkeypatch.syspath_prepend(str(tmp_path))
    by_file, by_module = (
        CallableReward(callable=f"{file}:f"),
        CallableReward(callable="my_rewards:f"),
    )
    before = digests(TrainedReward(), by_file, by_module)
    assert before.keys() == {"rewards.1", "rewards.2"}
    file.write_text("def f(prompts, responses): return [1.0 for _ in responses]")
    after = digests(TrainedReward(), by_file, by_module)
    assert all(after[name] != before[name] for name in before)


def test_a_reward_model_is_identified_by_its_bytes(tmp_path):
    def model(name: str, weights: str) -> ModelReward:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        return ModelReward(path=str(tmp_path / name))

    one, other, changed = (digests(model(*pair)) for pair in (("a", "x"), ("b", "x"), ("c", "y")))
    assert one == other
    assert one.keys() == changed.keys() == {"rewards.0"} and one != changed


def test_a_reward_model_of_this_pipeline_is_an_input(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    files = file_entries(tmp_path)
    Manifest("reward_model", "f", 1, {}, {}, {}, {}, files).write(tmp_path)
    reward = ModelReward(path=str(tmp_path))
    assert reward_inputs([reward]) == ({"rewards.0": tmp_path}, {})
    assert json.loads((tmp_path / "manifest.json").read_text())["stage"] == "reward_model"
