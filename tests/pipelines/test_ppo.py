"""What the ppo node gives its stage to read."""

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.pipelines.ppo import nodes
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.stages.cache.fingerprint import fingerprint, recipe

MODEL = {"optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def key(tmp_path, monkeypatch):
    """The stage's fingerprint for prepared data with some text, or without, in place of a launch."""

    def digest(job, launch, workspace):
        digests = {n: content_digest(path) for n, path in job.inputs.items()}
        return fingerprint(recipe(job, digests=digests, processes=1))

    monkeypatch.setattr(nodes, "run_stage", digest)

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
            micro_batch_size_per_gpu=2,
            actor=MODEL,
            critic=MODEL,
            ptx=ptx,
        )
        return nodes.ppo(
            folder, folder / "sft", folder / "sft", config, LaunchConfig(), 0, tmp_path
        )

    return key


def test_text_counts_only_where_it_is_read(key):
    assert key("some", None) == key("other", None) == key(None, None)
    assert (
        len({key("some", {"batch_size": 2}), key("other", {"batch_size": 2}), key("some", None)})
        == 3
    )


def test_prepared_data_without_text_is_refused_where_it_is_read(key):
    with pytest.raises(
        ArtifactError,
        match=r"pretraining holds nothing: .* run stage split with parameters that make it",
    ):
        key(None, {"batch_size": 2})
