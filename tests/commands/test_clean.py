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


@pytest.fixture
def models(tmp_path):
    """Three published versions of a model, none of which the workspace contains."""
    (tmp_path / "workspace").mkdir()
    folders = [tmp_path / "models" / "ppo_model" / made / "ppo_model" for made in TIMES]
    for made, folder in zip(TIMES, folders, strict=True):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(made)
        Manifest("ppo", f"f-{made}", 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folders


@pytest.fixture
def cleaned(models, tmp_path, monkeypatch):
    """Cleans with the options of the command; returns what is printed."""
    names = SimpleNamespace(all_outputs=lambda: {"ppo_model"})
    monkeypatch.setattr("rlhf_pipeline.kedro_run.artifacts.pipelines", {"all": names})
    now = Version(None, "2026-02-01T00.00.00.000Z")
    model = ArtifactDataset(filepath=str(tmp_path / "models" / "ppo_model"), version=now)
    workspace = MemoryDataset(str(tmp_path / "workspace"))
    catalog = DataCatalog({"workspace": workspace, "ppo_model": model})

    def cleaned(*, yes=True, unfinished=False):
        console = Console(file=io.StringIO(), width=200)
        clean.callback(Ledger(catalog, tmp_path), console, yes=yes, unfinished=unfinished)
        return console.file.getvalue()

    return cleaned


def test_published_versions_stay_and_replies_of_chat_models_are_listed_with_their_last_use(
    models, cleaned, tmp_path
):
    """Replies cost requests, so only a flag removes them."""
    replies = tmp_path / "workspace" / "judge_replies"
    replies.mkdir()
    (replies / "a.json").write_text("12345")
    os.utime(replies, (1e9, 1e9))
    why = time.strftime("replies of chat models, last used %Y-%m-%d %H:%M; ", time.localtime(1e9))
    listed = cleaned()
    assert f"kept: workspace/judge_replies: {why}--unfinished removes them" in listed
    assert "Nothing to remove" in listed and replies.is_dir()
    listed = cleaned(unfinished=True)
    assert " ".join(listed.split()).count(f"{why}asked for again when needed 5 bytes") == 1
    assert not replies.exists() and all(path.is_dir() for path in models)


def test_what_was_set_aside_as_damaged_is_listed_and_removed(models, cleaned, tmp_path):
    attempt = tmp_path / "workspace" / "ppo" / ("a" * 16)
    shutil.copytree(models[2], attempt / "export", copy_function=os.link)
    damaged = attempt / "checkpoints.damaged-2026-01-01T00.00.00.000000"
    memory = tmp_path / "workspace" / ".dry_runs"  # of checks before runs
    memory.mkdir()
    damaged.mkdir()
    (damaged / "weights").write_text("12345")
    shown = cleaned(yes=False)
    assert "checkpoints.damaged-2026-01-01T00.00.00.000000  damaged" in shown
    assert "frees 5 bytes" in shown and damaged.is_dir()
    cleaned()
    assert not damaged.exists() and not memory.exists()
    assert (attempt / "export" / "weights").is_file()


def test_what_a_short_run_left_is_removed_but_not_what_it_links_to(models, cleaned, tmp_path):
    split = tmp_path / "workspace" / "split"
    split.mkdir()
    (split / "rows").write_text("1")
    (tmp_path / ".prove" / "workspace").mkdir(parents=True)
    (tmp_path / ".prove" / "workspace" / "split").symlink_to(split)
    assert "left by a short run that failed" in cleaned()
    assert not (tmp_path / ".prove").exists() and (split / "rows").read_text() == "1"


def test_a_recipe_that_another_process_locks_is_kept_and_the_others_are_removed(
    models, cleaned, tmp_path
):
    """Its process has not recorded itself yet."""
    locked, free = (tmp_path / "workspace" / "ppo" / (name * 16) for name in "ab")
    for attempt in (locked, free):
        shutil.copytree(models[2], attempt / "export")
        (attempt / "export" / "manifest.json").unlink()
    with recipe_lock(locked, record=False):
        shown = cleaned()
    assert f"kept: workspace/ppo/{locked.name}: in use by another process" in shown
    assert "Removed; 24 bytes freed." in shown
    assert locked.is_dir() and not free.exists()
