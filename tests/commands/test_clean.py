"""`clean --versions` keeps what is registered, whatever registry the shell names."""

import io
import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
from kedro.io import DataCatalog, MemoryDataset, Version
from kedro_datasets.json import JSONDataset
from rich.console import Console

from rlhf_pipeline.commands.artifacts import Ledger
from rlhf_pipeline.commands.clean import clean
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import Manifest, content_digest, file_entries
from rlhf_pipeline.tracking.store import connect

TIMES = [f"2026-01-0{day}T00.00.00.000Z" for day in (1, 2, 3)]


class Shelf:
    """Three published versions of a model, none of which the workspace contains."""

    def __init__(self, root, empty_database) -> None:
        self.root = root
        (root / "workspace").mkdir()
        self.models = [self.publish(time) for time in TIMES]
        for name in ("team.db", "mlflow.db"):
            shutil.copy(empty_database, root / name)
        self.registry = f"sqlite:///{root}/team.db"

    def publish(self, time):
        folder = self.root / "models" / "ppo_model" / time / "ppo_model"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(time)
        Manifest("ppo", f"f-{time}", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
        return folder

    def register(self, number, digests=True):
        """Register a model in the team's registry, and publish the record as a run does."""
        client = connect(self.registry, self.root)
        client.create_registered_model("policy")
        client.create_model_version("policy", source=str(self.models[number]))
        record = {"model": "policy", "versions": {"ppo": "1"}}
        if digests:
            record["digests"] = {"ppo": content_digest(self.models[number])}
        file = self.root / "registration.json" / TIMES[number] / "registration.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(record))

    def clean(self, monkeypatch, registry, **options):
        """Clean with a registry; return what is printed."""
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registry)
        names = SimpleNamespace(all_outputs=lambda: {"ppo_model", "registration"})
        monkeypatch.setattr("rlhf_pipeline.commands.artifacts.pipelines", {"all": names})
        version = Version(None, "2026-02-01T00.00.00.000Z")
        file = str(self.root / "registration.json")
        catalog = DataCatalog(
            {
                "workspace": MemoryDataset(str(self.root / "workspace")),
                "ppo_model": ArtifactDataset(
                    filepath=str(self.root / "models" / "ppo_model"), version=version
                ),
                "registration": JSONDataset(filepath=file, version=version),
            }
        )
        console = Console(file=io.StringIO(), width=200)
        options = {"yes": True, "unfinished": False, "versions": True} | options
        clean.callback(Ledger(catalog, self.root), console, **options)
        return console.file.getvalue()

    @property
    def left(self):
        return [TIMES.index(path.parent.name) for path in self.models if path.is_dir()]


@pytest.fixture
def shelf(tmp_path, empty_database):
    """Three versions of a model."""
    return Shelf(tmp_path, empty_database)


def test_the_registry_of_the_runs_protects_its_versions(shelf, monkeypatch):
    shelf.register(0)
    printed = shelf.clean(monkeypatch, shelf.registry)
    assert f"registry: {shelf.registry}" in printed
    assert shelf.left == [0, 2]


def test_a_registry_that_does_not_know_the_model_is_refused(shelf, monkeypatch):
    """As the default one in the project, which a forgotten variable selects."""
    shelf.register(0)
    other = f"sqlite:///{shelf.root}/mlflow.db"
    with pytest.raises(
        ArtifactError,
        match=r"--versions: found no policy in the registry at sqlite:.*mlflow\.db, expected .*"
        r"Fix: set MLFLOW_TRACKING_URI as for the runs; if .*, remove .*registration",
    ):
        shelf.clean(monkeypatch, other)
    assert shelf.left == [0, 1, 2]
    assert "2 versions are older" in shelf.clean(monkeypatch, other, versions=False)


@pytest.mark.parametrize(("digests", "left"), [(True, [0, 2]), (False, [0, 1, 2])])
def test_a_registration_protects_its_model_from_a_registry_with_a_model_of_that_name(
    shelf, monkeypatch, digests, left
):
    """A registration without digests, by an earlier version, protects all models of its stage."""
    shelf.register(0, digests)
    other = f"sqlite:///{shelf.root}/mlflow.db"
    client = connect(other, shelf.root)
    client.create_registered_model("policy")
    client.create_model_version("policy", source="elsewhere")
    shelf.clean(monkeypatch, other)
    assert shelf.left == left


def test_without_registrations_all_older_versions_go(shelf, monkeypatch):
    shelf.clean(monkeypatch, shelf.registry)
    assert shelf.left == [2]


def test_a_version_of_the_future_keeps_the_real_newest_one(shelf, monkeypatch):
    shelf.publish("2931-01-01T00.00.00.000Z")
    with pytest.raises(
        ArtifactError,
        match=r"ppo_model: found version 2931-01-01T00\.00\.00\.000Z, expected none later than now",
    ):
        shelf.clean(monkeypatch, shelf.registry)
    assert shelf.left == [0, 1, 2]


def test_replies_of_chat_models_are_listed_with_their_last_use(shelf, monkeypatch):
    """They cost requests, so only a flag removes them."""
    replies = shelf.root / "workspace" / "judge_replies"
    replies.mkdir(parents=True)
    (replies / "a.json").write_text("12345")
    os.utime(replies, (1e9, 1e9))
    why = time.strftime("replies of chat models, last used %Y-%m-%d %H:%M; ", time.localtime(1e9))
    listed = shelf.clean(monkeypatch, shelf.registry, versions=False)
    assert f"kept: workspace/judge_replies: {why}--unfinished removes them" in listed
    assert replies.is_dir()
    listed = shelf.clean(monkeypatch, shelf.registry, versions=False, unfinished=True)
    assert " ".join(listed.split()).count(f"{why}asked for again when needed 5 bytes") == 1
    assert not replies.exists()


def test_what_was_set_aside_as_damaged_is_listed_and_removed(shelf, monkeypatch):
    attempt = shelf.root / "workspace" / "ppo" / ("a" * 16)
    shutil.copytree(shelf.models[2], attempt / "export", copy_function=os.link)
    damaged = attempt / "checkpoints.damaged-2026-01-01T00.00.00.000000"
    damaged.mkdir()
    (damaged / "weights").write_text("12345")
    shown = shelf.clean(monkeypatch, shelf.registry, yes=False, versions=False)
    assert "checkpoints.damaged-2026-01-01T00.00.00.000000  damaged" in shown
    assert "frees 5 bytes" in shown and damaged.is_dir()
    shelf.clean(monkeypatch, shelf.registry, versions=False)
    assert not damaged.exists() and (attempt / "export" / "weights").is_file()


def test_the_memory_of_checks_before_runs_is_removed(shelf, monkeypatch):
    memory = shelf.root / "workspace" / ".dry_runs"
    memory.mkdir(parents=True)
    (memory / "0123").touch()
    shelf.clean(monkeypatch, shelf.registry, versions=False)
    assert not memory.exists()
