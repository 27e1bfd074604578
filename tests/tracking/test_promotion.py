"""The present champion, found in a real MLflow database and on a real tracking server."""

import shutil

import pytest

from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.tracking.registry import find_champion
from rlhf_pipeline.tracking.store import DIGEST_TAG, experiment_id


def policy(folder, weights, tokens="tokens"):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "token_contract.json").write_text(tokens)
    Manifest("ppo", weights, 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


def crown(client, folder, **origin):
    """Make a policy the champion."""
    client.create_registered_model("policy")
    tags = {DIGEST_TAG: content_digest(folder)}
    origin = {"source": str(folder)} | origin
    version = client.create_model_version("policy", tags=tags, **origin)
    client.set_registered_model_alias("policy", "champion", version.version)


@pytest.fixture
def find(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    return lambda candidate: find_champion("policy", candidate, tmp_path, tmp_path / "downloads")


def test_a_model_without_a_champion(client, find, tmp_path):
    candidate = policy(tmp_path / "candidate", "new")
    assert find(candidate) is None  # the model does not exist either
    client.create_registered_model("policy")
    assert find(candidate) is None


def test_a_champion_does_not_compete_with_itself(client, find, tmp_path):
    candidate = policy(tmp_path / "candidate", "new")
    crown(client, candidate)
    again = shutil.copytree(candidate, tmp_path / "again")
    assert find(again) is None


def test_another_policy_competes(client, find, tmp_path):
    champion = policy(tmp_path / "champion", "old")
    crown(client, champion)
    found = find(policy(tmp_path / "candidate", "new"))
    assert (found.version, found.folder, found.fault) == ("1", champion, None)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (shutil.rmtree, "is not a finished artifact"),
        (lambda folder: (folder / "model.safetensors").write_text("changed"), "model.safetensors"),
    ],
)
def test_a_champion_that_is_gone_or_damaged_cannot_answer(client, find, tmp_path, damage, fault):
    champion = policy(tmp_path / "champion", "old")
    crown(client, champion)
    damage(champion)
    found = find(policy(tmp_path / "candidate", "new"))
    assert found.folder is None and fault in found.fault


def test_a_champion_with_other_tokens_cannot_answer(client, find, tmp_path):
    crown(client, policy(tmp_path / "champion", "old", tokens="others"))
    found = find(policy(tmp_path / "candidate", "new"))
    assert found.folder is None and "other tokens" in found.fault


@pytest.mark.slow
def test_the_champion_of_a_server_is_downloaded_once(served, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.tracking_uri)
    champion = policy(tmp_path / "champion", "old")
    run = served.create_run(experiment_id(served))
    served.log_artifacts(run.info.run_id, str(champion), "policy")
    source = f"{run.info.artifact_uri}/policy"
    crown(served, champion, source=source, run_id=run.info.run_id)
    candidate = policy(tmp_path / "candidate", "new")
    for _ in range(2):
        found = find_champion("policy", candidate, tmp_path, tmp_path / "downloads")
        assert found.fault is None
        assert (found.folder / "model.safetensors").read_text() == "old"
    assert len(list((tmp_path / "downloads").iterdir())) == 1
