"""The store: its address, an empty database, the run of a recipe, and versions of models."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from waiting import wait_until

from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.tracking.store import (
    DIGEST_TAG,
    EXPERIMENT,
    connect,
    experiment_id,
    find_champion,
    find_run,
    find_version,
    local_folder,
    registration,
    registry,
    tracking_uri,
)

SOURCE = Path(__file__).parents[2] / "src"


def test_the_default_store_is_a_database_in_the_project_and_the_environment_can_set_another(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert tracking_uri(Path("..")) == f"sqlite:///{tmp_path}/mlflow.db"
    for uri in ("http://tracking:5000", "postgresql+psycopg2://me:canary@host/runs"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert tracking_uri(tmp_path) == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgres://me:canary@host/runs")
    with pytest.raises(ConfigError, match="did you mean postgresql") as caught:
        tracking_uri(tmp_path)
    assert "canary" not in str(caught.value)


ENVIRONMENT = {
    "PYTHONPATH": str(SOURCE),
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
CONNECT = """
import os, signal, sys
from pathlib import Path
from rlhf_pipeline.tracking.store import *
project = Path(sys.argv[1])
uri = f'sqlite:///{project}/mlflow.db'
"""
KILL = """
from alembic.runtime.migration import HeadMaintainer
update, steps = HeadMaintainer.update_to_step, []
def killed(*arguments):
    steps.append(update(*arguments))
    if len(steps) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
HeadMaintainer.update_to_step = killed
connect(uri, project)
"""


@pytest.mark.slow
def test_processes_can_open_an_empty_database_at_once(tmp_path):
    program = f"{CONNECT}print(experiment_id(connect(uri, project)))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) for _ in range(2)]
    finished = [(process.communicate(timeout=600), process.returncode) for process in processes]
    assert [code for _, code in finished] == [0, 0], finished[0][0][1]
    assert [out for (out, _), _ in finished] == ["1\n", "1\n"]  # 0 is MLflow's "Default"


@pytest.mark.slow
def test_a_creation_that_was_killed_begins_again(tmp_path):
    """The kill comes between two of MLflow's migrations, which no later one can continue."""
    command = [sys.executable, "-c", CONNECT + KILL, str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} >= {"mlartifacts", "mlflow.db.new"}
    client = connect(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    assert experiment_id(client) == "1"
    assert {path.name for path in tmp_path.iterdir()} == {"mlartifacts", "mlflow.db"}


LATER = """
import sys
from pathlib import Path
from rlhf_pipeline.tracking.store import connect
connect(sys.argv[1], Path(sys.argv[2]))
print("pygments" in sys.modules)
import pandas, pygments, scipy.sparse
from mako.exceptions import html_error_template
from mlflow.data import from_pandas
print(pandas.DataFrame([1]).shape)
"""


def test_what_a_client_leaves_out_can_be_imported_later(uri, tmp_path):
    """Code of the user may be in the same process. MLflow itself is whole."""
    command = [sys.executable, "-c", LATER, uri, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "(1, 1)"]


def test_find_run_takes_the_newest_finished_run_of_the_recipe(client):
    assert find_run(client, "aaaa") is None  # the experiment does not exist
    experiment = experiment_id(client)

    def run(fingerprint, status, start_time):
        made = client.create_run(
            experiment, start_time=start_time, tags={"rlhf.fingerprint": fingerprint}
        )
        client.set_terminated(made.info.run_id, status)
        return made.info.run_id

    run("aaaa", "FINISHED", 1)
    newest = run("aaaa", "FINISHED", 3)
    run("aaaa", "FINISHED", 2)
    killed = run("aaaa", "KILLED", 4)
    run("bbbb", "FINISHED", 5)
    assert find_run(client, "aaaa") == newest
    assert find_run(client, "aaaa", finished=False) == killed
    assert find_run(client, "bbbb", finished=False) is None
    assert find_run(client, "cccc") is None


def test_a_store_that_was_moved_writes_beside_itself_and_reads_its_earlier_runs(
    empty_database, tmp_path
):
    """The paths that MLflow stores are absolute. It would make the earlier folders again."""
    old, new = tmp_path / "it's 100% #1", tmp_path / "new"
    old.mkdir()
    shutil.copy(empty_database, old / "mlflow.db")
    client = connect(f"sqlite:///{old}/mlflow.db", old)
    experiment = experiment_id(client)
    elsewhere = client.create_experiment("other", f"{old}-other/mlruns")
    # MLflow remembers in a process where the run of a first artifact is.
    run, other = (client.create_run(experiment).info.run_id for _ in range(2))
    client.log_text(run, "before", "page.txt")
    old.rename(new)
    client = connect(f"sqlite:///{new}/mlflow.db", new)
    assert experiment_id(client) == experiment
    page = f"{client.get_run(run).info.artifact_uri}/page.txt"
    assert mlflow.artifacts.load_text(page) == "before"
    for each in (other, client.create_run(experiment).info.run_id):
        client.log_text(each, "after", "page.txt")
        assert (new / "mlartifacts" / each / "artifacts" / "page.txt").read_text() == "after"
    assert not old.exists()
    assert client.get_experiment(elsewhere).artifact_location == f"{old}-other/mlruns"


def test_experiments_of_others_and_a_folder_that_exists_stay_where_they_are(uri, client, tmp_path):
    """A user's store can have artifacts on another disk, which may be out of reach for a while."""
    own, disk = tmp_path / "own" / "mlartifacts", tmp_path / "disk" / "mlartifacts"
    own.mkdir(parents=True)
    experiments = [
        client.create_experiment(EXPERIMENT, str(own)),
        client.create_experiment("theirs", str(disk)),
    ]
    runs = [client.create_run(experiment).info for experiment in experiments]
    (elsewhere := tmp_path / "project").mkdir()
    client = connect(uri, elsewhere)
    found = [client.get_experiment(experiment).artifact_location for experiment in experiments]
    assert found == [str(own), str(disk)]
    assert [client.get_run(run.run_id).info.artifact_uri for run in runs] == [
        run.artifact_uri for run in runs
    ]


def test_a_copied_project_writes_nothing_into_the_original(empty_database, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    shutil.copy(empty_database, original)
    chosen = str(original / "mlartifacts")
    client = connect(f"sqlite:///{original}/mlflow.db", original)
    experiment = client.create_experiment(EXPERIMENT, chosen)
    assert experiment_id(connect(f"sqlite:///{original}/mlflow.db", original)) == experiment
    shutil.copytree(original, copy)
    client = connect(f"sqlite:///{copy}/mlflow.db", copy)
    assert client.get_experiment_by_name(EXPERIMENT).artifact_location == str(copy / "mlartifacts")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 2 " * 9])
def test_a_damaged_database_is_named_and_not_made_anew(monkeypatch, tmp_path, content, named):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = tmp_path / ("runs.db" if named else "mlflow.db")
    if named:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    file.write_bytes(content)
    message = rf"{file}: found {len(content)} bytes .* Fix: restore it"
    with pytest.raises(ConfigError, match=message):
        tracking_uri(tmp_path)
    assert file.read_bytes() == content


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


def weights_in(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text("weights")
    Manifest("ppo", "b", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def version(client, tmp_path):
    """Registers a policy that is not on this machine, with any tag of its content."""
    source = weights_in(tmp_path / "server" / "policy")
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


@pytest.mark.parametrize(
    "place", ["champions/30a3d9d3b0fc8e4e52fbf8351f0de86aa83c3f7e8c9e24ae", "server/policy"]
)
def test_other_content_that_is_here_already_is_refused(client, version, tmp_path, place):
    here = weights_in(tmp_path / place)
    found = version(OTHER, str(here)) if place == "server/policy" else version(OTHER)
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
    registered = root / place.replace("/f/", "/f1/")
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
    ("tokens", "damage", "fault"),
    [
        ("tokens", shutil.rmtree, r"found nothing in .*/champion, .* Fix: put the model back"),
        ("tokens", lambda folder: (folder / "model.safetensors").write_text("changed"),
         "model.safetensors"),
        ("others", lambda folder: None, "other tokens"),
    ],
)  # fmt: skip
def test_a_champion_that_is_gone_damaged_or_of_other_tokens_cannot_answer(
    client, find, tmp_path, tokens, damage, fault
):
    client.create_registered_model("policy")
    champion = policy(tmp_path / "champion", "old", tokens)
    crown(client, champion)
    damage(champion)
    found = find(policy(tmp_path / "candidate", "new"))
    assert found.folder is None and re.search(fault, found.fault)


@pytest.mark.long
def test_the_champion_of_a_server_is_downloaded_once(serve, tmp_path, monkeypatch):
    served = serve("--artifacts-destination", str(tmp_path / "served"))
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


def test_a_store_that_is_silent_is_named_after_seconds(client, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    monkeypatch.setattr("rlhf_pipeline.tracking.store.SILENT_S", 0.01)
    with registry(tmp_path, "a version"):
        wait_until(lambda: "has not returned a version yet" in caplog.text)
    monkeypatch.setattr("rlhf_pipeline.tracking.store.SILENT_S", 60.0)
    with registry(tmp_path, "the champion"):
        pass
    assert "the champion" not in caplog.text
