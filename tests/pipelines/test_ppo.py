"""The inputs of the stage ppo."""

from importlib import metadata
from pathlib import Path

import pytest

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.pipelines.ppo import ppo
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.stages.cache.fingerprint import fingerprint, library_version, recipe
from rlhf_pipeline.stages.job import RunContext

MODEL = {"optimizer": {"learning_rate": 1e-3}}
TRAINED = RewardModelConfig(epochs=1, batch_size=2, micro_batch_tokens=32, **MODEL)


class Fingerprints:
    """Returns fingerprints instead of running stages."""

    def run(self, job):
        digests = {name: content_digest(path) for name, path in job.inputs.items()}
        return fingerprint(recipe(job, digests, RunContext(Path()), 1))


class Jobs:
    """Keeps the jobs instead of running stages."""

    def __init__(self):
        self.jobs = []

    def run(self, job):
        self.jobs.append(job)


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
        return ppo(folder, folder / "sft", folder / "sft", TRAINED, config, 0, Fingerprints())

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


def test_the_version_of_vllm_is_part_of_the_recipe(tmp_path, monkeypatch):
    """Its package has another name on machines without a GPU."""
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["pytest"]})
    assert library_version.__wrapped__("vllm") == pytest.__version__


@pytest.mark.parametrize(
    ("installed", "gpus", "changes", "expected"),
    [
        (True, "0", {}, "vllm"),
        (True, "", {}, "auto"),  # transformers
        (False, "0", {}, "auto"),
        (True, "0", {"gather_for_generation": False}, "auto"),  # which vLLM cannot do
        (True, "0", {"generator": "transformers"}, "transformers"),
        (True, "", {"generator": "vllm"}, "vllm"),
    ],
)
def test_auto_is_vllm_where_it_is_installed_and_a_gpu_is_there(
    tmp_path, monkeypatch, installed, gpus, changes, expected
):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("rlhf_pipeline.pipelines.ppo.find_spec", {"vllm": installed or None}.get)
    sizes = {"steps": 1, "rollout_batch_size": 2, "minibatch_size": 2, "micro_batch_tokens": 32}
    config = PPOConfig(**sizes, actor=MODEL, critic=MODEL, **changes)
    stages = Jobs()
    ppo(tmp_path, tmp_path, tmp_path, TRAINED, config, 0, stages)
    (job,) = stages.jobs
    assert job.config["ppo"].generator == expected
    assert ("vllm" in job.spec.libraries) == (expected == "vllm")
    assert config.generator == changes.get("generator", "auto")
