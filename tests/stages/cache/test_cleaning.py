"""Cleaning removes only what no published version needs; freed bytes exclude other hard links."""

import json
import os
import shutil

import pytest

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.heartbeat import process_identity
from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.stages.cache.workspace import downloads, recipe_lock, remove, survey

STAGES = ["source", "split", "sft"]


@pytest.fixture
def workspace(tmp_path):
    return tmp_path / "workspace"


def publish(directory, tmp_path):
    version = tmp_path / "published" / directory.parent.name / directory.name
    shutil.copytree(directory / "export", version, copy_function=os.link)
    return version


def reasons(workspace, published=(), *, unfinished=False):
    leftovers, kept = survey(workspace, STAGES, published, {}, unfinished=unfinished)
    removed = {
        leftover.path.relative_to(workspace).as_posix(): leftover.why for leftover in leftovers
    }
    return removed, {path.relative_to(workspace).as_posix(): why for path, why in kept.items()}


def test_only_what_no_published_version_needs_is_removed(make_work, workspace, tmp_path):
    source = make_work("source", "a", content="rows")
    split = make_work("split", "b", inputs={"source_0": content_digest(source / "export")})
    make_work("source", "c", content="other rows")
    forced = make_work("sft", "d")
    make_work("sft", "d", suffix=".2")
    make_work("sft", "d", suffix=".10")
    make_work("sft", "d", suffix=".11", finished=False)
    damaged = make_work("sft", "e")
    published = [publish(directory, tmp_path) for directory in (split, forced, damaged)]
    (damaged / "export" / "weights").unlink()
    (workspace / "sft" / "notes").mkdir()
    (workspace / "mine" / "a000000000000000").mkdir(parents=True)
    removed, kept = reasons(workspace, published)
    assert removed == {
        "source/c000000000000000": "nothing published was made from it",
        "sft/d000000000000000": "replaced by a later attempt",
        "sft/d000000000000000.2": "replaced by a later attempt",
        "sft/d000000000000000.11": "unfinished",
        "sft/e000000000000000": "damaged: weights is missing",
    }
    assert kept == {}


def test_resumable_stages_and_their_inputs_are_kept_without_the_option_unfinished(
    make_work, workspace
):
    source = make_work("source", "a", content="rows")
    inputs = {"source_0": content_digest(source / "export")}
    make_work("split", "b", inputs=inputs, finished=False, checkpoint=12)
    make_work("split", "c", inputs=inputs, finished=False)
    removed, kept = reasons(workspace)
    assert removed == {"split/c000000000000000": "unfinished"}
    assert kept == {"split/b000000000000000": "can resume from step 12; --unfinished removes it"}
    assert list(reasons(workspace, unfinished=True)[0]) == [
        "source/a000000000000000", "split/b000000000000000", "split/c000000000000000",
    ]  # fmt: skip


def test_stages_used_by_a_running_process_and_their_inputs_are_kept(make_work, workspace):
    source = make_work("source", "a", content="rows")
    split = make_work(
        "split", "b", inputs={"source_0": content_digest(source / "export")}, finished=False
    )
    with recipe_lock(split):
        pass
    removed, kept = reasons(workspace, unfinished=True)
    assert removed == {}
    assert list(kept) == ["split/b000000000000000"]
    assert kept["split/b000000000000000"].startswith(f"in use by process {os.getpid()} since ")
    forget_users(workspace)
    assert len(reasons(workspace)[0]) == 2


def forget_users(workspace):
    """Pretend that the processes have ended."""
    for file in (workspace / ".locks").glob("*.json"):
        file.write_text(json.dumps({"driver": "1@0.0", "since": 0.0}))


def test_freed_bytes_exclude_files_with_another_hard_link(make_work, workspace, tmp_path):
    one = make_work("sft", "a", content="12345")
    two = make_work("sft", "b", finished=False, content="123")
    three = make_work("sft", "c", content="123456")
    (two / "export" / "weights").unlink()
    os.link(one / "export" / "weights", two / "again")  # both links are removed: freed
    os.link(two / "job.json", tmp_path / "elsewhere")  # the other link stays: not freed
    published = publish(three, tmp_path)  # with links to the files of the export
    leftovers = survey(workspace, STAGES, [], {}, unfinished=False)[0]
    job, manifest = len('{"digests": {}}'), (one / "export" / "manifest.json").stat().st_size
    assert [leftover.freed for leftover in leftovers] == [5 + job + manifest, 0, job]
    assert [remove(leftover, workspace) for leftover in leftovers] == [None] * 3
    assert list((workspace / "sft").iterdir()) == []
    assert (published / "weights").read_text() == "123456"


def test_a_directory_locked_after_the_survey_is_kept(make_work, workspace):
    directory = make_work("sft", "a")
    (leftover,) = survey(workspace, STAGES, [], {}, unfinished=False)[0]
    with recipe_lock(directory):
        assert remove(leftover, workspace).startswith(
            f"process {process_identity(os.getpid()).partition('@')[0]} since"
        )
    assert (directory / "export" / "weights").is_file()


def test_interrupted_publications_are_removed_with_their_empty_folder(
    make_work, workspace, tmp_path
):
    partial = tmp_path / "models" / "v1" / "sft_model.99.partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_text("1234")
    (leftover,) = survey(
        workspace, STAGES, [], {partial: "left by an interrupted publication"}, unfinished=False
    )[0]
    assert (leftover.why, leftover.freed) == ("left by an interrupted publication", 4)
    remove(leftover, workspace)
    assert list((tmp_path / "models").iterdir()) == []


def download(workspace, name):
    folder = workspace / "champions" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_downloaded_champions_are_removed_unless_a_stage_reads_them(make_work, workspace):
    old, read = download(workspace, "a" * 48), download(workspace, "b" * 48)
    download(workspace, "tmpx/policy")  # not yet renamed
    assert downloads(workspace) == [old, read]
    stage = make_work("sft", "a", finished=False)
    job = {"digests": {}, "inputs": {"champion_model": str(read.resolve())}}
    (stage / "job.json").write_text(json.dumps(job))
    unwanted = dict.fromkeys(downloads(workspace), "a download")
    with recipe_lock(stage):
        leftovers, kept = survey(workspace, STAGES, [], unwanted, unfinished=False)
    assert [leftover.path for leftover in leftovers] == [old]
    assert kept[read] == "an input of a kept stage"
    assert remove(leftovers[0], workspace) is None and not old.exists()
    forget_users(workspace)
    leftovers, _ = survey(workspace, STAGES, [], {read: "a download"}, unfinished=False)
    assert read in [leftover.path for leftover in leftovers]


def test_a_published_version_of_unknown_origin_stops_the_survey(make_work, workspace, tmp_path):
    published = publish(make_work("sft", "a"), tmp_path)
    (published / "manifest.json").unlink()
    (published / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
        survey(workspace, STAGES, [published], {}, unfinished=False)


@pytest.mark.parametrize("linked", ["attempt", "stage", "publication"])
def test_nothing_is_removed_through_a_link(make_work, workspace, tmp_path, linked):
    directory = make_work("sft", "a", finished=False)
    partial = tmp_path / "models" / "v1" / "sft_model.99.partial"
    partial.mkdir(parents=True)
    there = {"attempt": directory, "stage": directory.parent, "publication": partial}[linked]
    there.rename(tmp_path / "elsewhere")
    there.symlink_to(tmp_path / "elsewhere")
    leftovers, kept = survey(workspace, STAGES, [], {partial: "partial"}, unfinished=False)
    path = partial if linked == "publication" else directory
    assert path not in [leftover.path for leftover in leftovers]
    assert kept == {path: f"is a link to {path.resolve()}; remove that yourself"}
