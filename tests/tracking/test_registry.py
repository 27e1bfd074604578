"""Versions and the champion of a registered model, in a real database and on a real server."""

import re
import shutil

import pytest

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.tracking.store import (
    DIGEST_TAG,
    experiment_id,
    find_champion,
    find_version,
    local_folder,
    registration,
)


def test_the_newest_version_with_a_content_and_its_tags(client, tmp_path):
    assert registration("a", "mine", tmp_path) is None
    for model, digest in (("mine", "a"), ("mine", "b"), ("mine", "a"), ("other", "a")):
        if model not in [found.name for found in client.search_registered_models()]:
            client.create_registered_model(model)
        client.create_model_version(model, source=str(tmp_path), tags={DIGEST_TAG: digest})
    client.set_model_version_tag("mine", "3", "rlhf.verdict", "{}")
    assert registration("a", "mine", tmp_path) == ("3", {DIGEST_TAG: "a", "rlhf.verdict": "{}"})
    assert registration("b", "mine", tmp_path) == ("2", {DIGEST_TAG: "b"})
    assert registration("c", "mine", tmp_path) is None


# printf '{"model.safetensors": "'$(printf weights | sha256sum | cut -c-64)'"}' | sha256sum
WEIGHTS = "758bed0194f35c144d1db50511b7ea6e76f5a2f6e824057aa0f9bec2bf434003"
OTHER = "0" * 64


@pytest.fixture
def version(client, tmp_path):
    """Registers a policy that is not on this machine, with any tag of its content."""
    source = tmp_path / "server" / "policy"
    source.mkdir(parents=True)
    (source / "model.safetensors").write_text("weights")
    Manifest("ppo", "b", 0, {}, {}, {}, {}, file_entries(source)).write(source)
    client.create_registered_model("mine")

    def create(tag, place=None):
        uri = place or source.as_uri()
        tags = {} if tag is None else {DIGEST_TAG: tag}
        client.create_model_version("mine", uri, run_id="abc", tags=tags)
        return find_version(client, "mine", "1")

    return create


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        # printf abc-1-758b... | sha256sum | cut -c-48, with the whole tag
        (WEIGHTS, "b051aaf932fb8726cd69206522a80afe1fa11e0ffd598622"),
        (None, "6ad6801480e5f5f283d0f11c85ecd7d1e83a5f225037dcd1"),  # abc-1-None
    ],
)
def test_a_policy_is_downloaded_once(client, version, tmp_path, tag, name):
    downloads = tmp_path / "downloads"
    found = local_folder(client, version(tag), downloads)
    assert found == downloads / name
    (tmp_path / "server" / "policy" / "model.safetensors").unlink()
    assert local_folder(client, find_version(client, "mine", "1"), downloads) == found
    assert (found / "model.safetensors").read_text() == "weights"


@pytest.mark.parametrize("tag", ["../../transformers", "{root}/transformers", "", OTHER])
def test_other_content_than_the_registered_one_is_not_kept(client, version, tmp_path, tag):
    """Everybody who can write to the store chooses the tag."""
    found, before = version(tag.format(root=tmp_path)), files(tmp_path)
    with pytest.raises(ArtifactError, match=f"version 1 of mine: found content {WEIGHTS}"):
        local_folder(client, found, tmp_path / "work" / "champions")
    assert files(tmp_path) == before


@pytest.mark.parametrize("place", ["champions", "server/policy"])
def test_other_content_that_is_here_already_is_refused(client, version, tmp_path, place):
    here = tmp_path / (
        place if "/" in place else f"{place}/30a3d9d3b0fc8e4e52fbf8351f0de86aa83c3f7e8c9e24ae"
    )
    here.mkdir(parents=True, exist_ok=True)
    (here / "model.safetensors").write_text("weights")
    Manifest("ppo", "b", 0, {}, {}, {}, {}, file_entries(here)).write(here)
    found = version(OTHER, str(here)) if "/" in place else version(OTHER)
    with pytest.raises(ArtifactError, match=f"found content {WEIGHTS} in {here}"):
        local_folder(client, found, tmp_path / "champions")


def policy(folder, weights, tokens="tokens"):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "token_contract.json").write_text(tokens)
    Manifest("ppo", weights, 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


def crown(client, folder, **origin):
    """Make a policy the champion of an existing model."""
    tags = {DIGEST_TAG: content_digest(folder)}
    origin = {"source": str(folder)} | origin
    version = client.create_model_version("policy", tags=tags, **origin)
    client.set_registered_model_alias("policy", "champion", version.version)


@pytest.fixture
def find(client, tmp_path):
    return lambda candidate: find_champion("policy", candidate, tmp_path, tmp_path / "downloads")


def test_another_policy_than_the_candidate_competes(client, find, tmp_path):
    candidate = policy(tmp_path / "candidate", "new")
    assert find(candidate) is None  # the model does not exist
    client.create_registered_model("policy")
    assert find(candidate) is None
    champion = policy(tmp_path / "champion", "old")
    crown(client, champion)
    found = find(candidate)
    assert (found.version, found.folder, found.fault) == ("1", champion, None)
    assert find(shutil.copytree(champion, tmp_path / "again")) is None


@pytest.mark.parametrize("place", ["06_models/ppo_model/v1/ppo_model", "07_workspace/ppo/f/export"])
def test_a_project_that_was_moved_finds_its_models_by_their_content(client, tmp_path, place):
    """Among others: the folder that was registered is gone."""
    client.create_registered_model("policy")
    root = tmp_path / "old" / "data"
    for number, model in enumerate(("other", "mine")):
        policy(root / place.replace("v1", f"v{number}").replace("/f/", f"/f{number}/"), model)
    registered = root / place.replace("v1", "v1").replace("/f/", "/f1/")
    crown(client, registered)
    version = find_version(client, "policy", "champion")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / registered.relative_to(tmp_path / "old")
    downloads = tmp_path / "new" / "data" / "07_workspace" / "champions"
    assert local_folder(client, version, downloads) == moved
    (moved / "model.safetensors").write_text("changed")
    assert local_folder(client, version, downloads) == moved  # who loads it verifies it
    shutil.rmtree(moved)
    with pytest.raises(
        ArtifactError,
        match=rf"version 1 of policy: found nothing in {registered}, and no artifact with its "
        rf"content \w+ below {tmp_path}/new/data, expected its model\. Fix: put the model back",
    ):
        local_folder(client, version, downloads)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (shutil.rmtree, r"found nothing in .*/champion, and no artifact with its content"),
        (lambda folder: (folder / "model.safetensors").write_text("changed"), "model.safetensors"),
    ],
)
def test_a_champion_that_is_gone_or_damaged_cannot_answer(client, find, tmp_path, damage, fault):
    client.create_registered_model("policy")
    champion = policy(tmp_path / "champion", "old")
    crown(client, champion)
    damage(champion)
    found = find(policy(tmp_path / "candidate", "new"))
    assert found.folder is None and re.search(fault, found.fault)


def test_a_champion_with_other_tokens_cannot_answer(client, find, tmp_path):
    client.create_registered_model("policy")
    crown(client, policy(tmp_path / "champion", "old", tokens="others"))
    found = find(policy(tmp_path / "candidate", "new"))
    assert found.folder is None and "other tokens" in found.fault


@pytest.mark.long
def test_the_champion_of_a_server_is_downloaded_once(served, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.tracking_uri)
    champion = policy(tmp_path / "champion", "old")
    run = served.create_run(experiment_id(served))
    served.log_artifacts(run.info.run_id, str(champion), "policy")
    source = f"{run.info.artifact_uri}/policy"
    served.create_registered_model("policy")
    crown(served, champion, source=source, run_id=run.info.run_id)
    candidate = policy(tmp_path / "candidate", "new")
    for _ in range(2):
        found = find_champion("policy", candidate, tmp_path, tmp_path / "downloads")
        assert found.fault is None
        assert (found.folder / "model.safetensors").read_text() == "old"
    assert len(list((tmp_path / "downloads").iterdir())) == 1
