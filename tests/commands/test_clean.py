"""What `clean` lists and removes beside work directories."""

import io
import os
import shutil
import time
from types import SimpleNamespace

import pytest
from kedro.io import DataCatalog, MemoryDataset, Version
from rich.console import Console

from rlhf_pipeline.commands.clean import clean
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages.cache.workspace import recipe_lock

TIMES = [f"2026-01-0{day}T00.00.00.000Z" for day in (1, 2, 3)]


class Shelf:
    """Three published versions of a model, none of which the workspace contains."""

    def __init__(self, root) -> None:
        self.root = root
        (root / "workspace").mkdir()
        self.models = [self.publish(time) for time in TIMES]

    def publish(self, time):
        folder = self.root / "models" / "ppo_model" / time / "ppo_model"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(time)
        Manifest("ppo", f"f-{time}", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
        return folder

    def clean(self, monkeypatch, **options):
        """Clean; return what is printed."""
        names = SimpleNamespace(all_outputs=lambda: {"ppo_model"})
        monkeypatch.setattr("rlhf_pipeline.kedro_run.artifacts.pipelines", {"all": names})
        version = Version(None, "2026-02-01T00.00.00.000Z")
        catalog = DataCatalog(
            {
                "workspace": MemoryDataset(str(self.root / "workspace")),
                "ppo_model": ArtifactDataset(
                    filepath=str(self.root / "models" / "ppo_model"), version=version
                ),
            }
        )
        console = Console(file=io.StringIO(), width=200)
        options = {"yes": True, "unfinished": False} | options
        clean.callback(Ledger(catalog, self.root), console, **options)
        return console.file.getvalue()


@pytest.fixture
def shelf(tmp_path):
    """Three versions of a model."""
    return Shelf(tmp_path)


def test_published_versions_stay(shelf, monkeypatch):
    assert "Nothing to remove" in shelf.clean(monkeypatch)
    assert all(path.is_dir() for path in shelf.models)


def test_replies_of_chat_models_are_listed_with_their_last_use(shelf, monkeypatch):
    """They cost requests, so only a flag removes them."""
    replies = shelf.root / "workspace" / "judge_replies"
    replies.mkdir(parents=True)
    (replies / "a.json").write_text("12345")
    os.utime(replies, (1e9, 1e9))
    why = time.strftime("replies of chat models, last used %Y-%m-%d %H:%M; ", time.localtime(1e9))
    listed = shelf.clean(monkeypatch)
    assert f"kept: workspace/judge_replies: {why}--unfinished removes them" in listed
    assert replies.is_dir()
    listed = shelf.clean(monkeypatch, unfinished=True)
    assert " ".join(listed.split()).count(f"{why}asked for again when needed 5 bytes") == 1
    assert not replies.exists()


def test_what_was_set_aside_as_damaged_is_listed_and_removed(shelf, monkeypatch):
    attempt = shelf.root / "workspace" / "ppo" / ("a" * 16)
    shutil.copytree(shelf.models[2], attempt / "export", copy_function=os.link)
    damaged = attempt / "checkpoints.damaged-2026-01-01T00.00.00.000000"
    memory = shelf.root / "workspace" / ".dry_runs"  # of checks before runs
    memory.mkdir()
    damaged.mkdir()
    (damaged / "weights").write_text("12345")
    shown = shelf.clean(monkeypatch, yes=False)
    assert "checkpoints.damaged-2026-01-01T00.00.00.000000  damaged" in shown
    assert "frees 5 bytes" in shown and damaged.is_dir()
    shelf.clean(monkeypatch)
    assert not damaged.exists() and not memory.exists()
    assert (attempt / "export" / "weights").is_file()


def test_a_recipe_that_another_process_locks_is_kept_and_the_others_are_removed(shelf, monkeypatch):
    """Its process has not recorded itself yet."""
    locked, free = (shelf.root / "workspace" / "ppo" / (name * 16) for name in "ab")
    for attempt in (locked, free):
        shutil.copytree(shelf.models[2], attempt / "export")
        (attempt / "export" / "manifest.json").unlink()
    with recipe_lock(locked, record=False):
        shown = shelf.clean(monkeypatch)
    assert f"kept: workspace/ppo/{locked.name}: in use by another process" in shown
    assert "Removed; 24 bytes freed." in shown
    assert locked.is_dir() and not free.exists()
