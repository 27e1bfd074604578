"""The inputs of the stage ppo."""

from importlib import metadata

import pytest

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.pipelines.ppo.nodes import check_gate, ppo
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.stages.cache.fingerprint import _version, fingerprint, recipe

MODEL = {"optimizer": {"learning_rate": 1e-3}}


class Fingerprints:
    """Returns fingerprints instead of running stages."""

    def run(self, job):
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        return fingerprint(recipe(job, digests=digests, processes=1))


@pytest.fixture
def key(tmp_path):
    """The stage's fingerprint for a split with some text, or without text."""

    def key(text, ptx):
        folder = tmp_path / str(text)
        for name, content in {"ppo": "prompts", "sft": "examples", "pretraining": text}.items():
            if content is not None:
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / "train.arrow").write_text(content)
        Manifest("split", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
        config = PPOConfig(
            steps=1,
            rollout_batch_size=2,
            minibatch_size=2,
            micro_batch_tokens=32,
            actor=MODEL,
            critic=MODEL,
            ptx=ptx,
        )
        gate = RewardModelConfig.model_construct(gate=None)
        return ppo(folder, folder / "sft", folder / "sft", config, gate, 0, Fingerprints())

    return key


def test_text_counts_only_with_the_ptx_loss(key):
    assert key("some", None) == key("other", None) == key(None, None)
    assert (
        len({key("some", {"batch_size": 2}), key("other", {"batch_size": 2}), key("some", None)})
        == 3
    )


def test_a_split_without_text_is_refused_with_the_ptx_loss(key):
    with pytest.raises(
        ArtifactError,
        match=r"pretraining is empty: .* run stage split with parameters that create it",
    ):
        key(None, {"batch_size": 2})


@pytest.fixture
def reward_model(tmp_path):
    """A finished reward model whose accuracy is between 45% and 65%."""
    ends = {"": 0.55, "_lower": 0.45, "_upper": 0.65}
    metrics = {f"validation/accuracy{end}": value for end, value in ends.items()}
    Manifest("reward_model", "", 0, {}, {}, {}, metrics, {}).write(tmp_path)
    return tmp_path


def test_a_reward_model_that_may_be_no_better_than_chance_never_reaches_ppo(reward_model):
    with pytest.raises(
        StageError,
        match=r"reward_model\.gate: found an accuracy of 55\.0% \(95%: 45\.0% to 65\.0%\) on "
        r"held-out comparisons, expected a lower end above 50\.0%.*set reward_model\.gate to null",
    ):
        check_gate(reward_model, 0.5)


@pytest.mark.parametrize("gate", [None, 0.44])
def test_a_reward_model_above_the_gate_reaches_ppo(reward_model, gate):
    check_gate(reward_model, gate)


def test_the_version_of_vllm_is_part_of_the_recipe(tmp_path, monkeypatch):
    """Its package has another name on machines without a GPU."""
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["pytest"]})
    assert _version.__wrapped__("vllm") == pytest.__version__
