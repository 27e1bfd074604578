"""One process at a time runs a recipe, another one reports whom it waits for. Cleaning removes only
what no published version needs."""

import json
import os
import re
import shutil
import signal
from contextlib import suppress

import psutil
import pytest
from waiting import HANGS_S, once, wait_until

from rlhf_pipeline.errors import ArtifactError, StageError
from rlhf_pipeline.runtime.heartbeat import process_identity
from rlhf_pipeline.runtime.manifest import content_digest
from rlhf_pipeline.stages.cache.workspace import (
    attempts,
    downloads,
    recipe_lock,
    remove,
    survey,
    user,
)

STAGES = ["source", "split", "sft"]


def first_attempt(drill):
    return next((drill.root / "workspace" / "drill").iterdir())


@pytest.fixture
def held(drill):
    """Another process that is running the stage."""
    drill.order("hold")
    process = drill.run_elsewhere()
    wait_until(lambda: drill.launches == 1)
    yield process
    process.kill()
    process.wait()


def test_the_second_run_waits_and_reports_for_whom(drill, held, caplog):
    def release():
        drill.order("hold", given=False)

    with once(lambda: "waiting until it ends" in caplog.text, release):
        export = drill.run()
    assert held.communicate(timeout=HANGS_S)[0].strip() == str(export)
    assert (drill.launches, (export / "result").read_text()) == (1, "launch 1")
    pattern = (
        rf"stage drill: recipe {export.parent.name[:8]} is being run by process {held.pid} since "
        r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; waiting until it ends"
    )
    assert any(re.fullmatch(pattern, message) for message in caplog.messages)


def test_another_recipe_does_not_wait_but_without_waiting_the_same_one_fails(drill, held):
    message = rf"is being run by process {held.pid} since .* Fix: set launch\.wait to true"
    with pytest.raises(StageError, match=message):
        drill.run(wait=False)
    assert drill.launches == 1
    with once(lambda: drill.launches == 2, lambda: drill.order("hold", given=False)):
        mine = drill.run(value=2, wait=False)
    theirs = held.communicate(timeout=HANGS_S)[0].strip()
    assert str(mine) != theirs


def test_the_lock_of_a_killed_process_is_free_and_its_program_is_ended(drill, held):
    """The program may outlive its driver; two of them would write into one directory.

    While the driver's guard is stopped, it cannot end the program.
    """
    assert user(first_attempt(drill)).startswith(f"process {held.pid} since ")
    orphans = psutil.Process(held.pid).children()
    for orphan in orphans:
        orphan.suspend()
    wait_until(lambda: {orphan.status() for orphan in orphans} == {psutil.STATUS_STOPPED})
    os.kill(held.pid, signal.SIGKILL)
    held.wait()
    assert user(first_attempt(drill)) is None
    (program,) = [each for each in orphans if "drill_program" in each.cmdline()]
    drill.order("hold", given=False)
    export = drill.run(wait=False)
    assert process_identity(program.pid) is None
    for guard in orphans:
        with suppress(psutil.NoSuchProcess):
            guard.resume()
    assert attempts(export.parent) == [export.parent]
    assert (drill.launches, (export / "result").read_text()) == (2, "launch 2")
    assert user(export.parent).startswith(f"process {os.getpid()} since ")


def test_a_damaged_record_of_an_owner_is_none(drill, in_this_process):
    first = drill.run().parent
    (owner,) = (drill.root / "workspace" / ".locks").glob("*.json")
    for record in ("", "{}", "[]", '{"driver": "x 1@2"}', '{"driver": 1, "since": 0}'):
        owner.write_text(record)
        assert user(first) is None


@pytest.fixture
def workspace(tmp_path):
    return tmp_path / "workspace"


def publish(directory, tmp_path):
    version = tmp_path / "published" / directory.parent.name / directory.name
    shutil.copytree(directory / "export", version, copy_function=os.link)
    return version


def reasons(workspace, published=(), *, unfinished=False):
    leftovers, kept = survey(workspace, STAGES, published, {}, unfinished=unfinished)
    removed = {leftover.path: leftover.why for leftover in leftovers}
    return [
        {path.relative_to(workspace).as_posix(): why for path, why in each.items()}
        for each in (removed, kept)
    ]


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
    inputs = {"source_0": content_digest(source / "export")}
    split = make_work("split", "b", inputs=inputs, finished=False)
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
    one, two = make_work("sft", "a", content="12345"), make_work("sft", "b", content="123456")
    published = publish(two, tmp_path)  # with links to the files of the export
    leftovers = survey(workspace, STAGES, [], {}, unfinished=False)[0]
    job, manifest = len('{"digests": {}}'), (one / "export" / "manifest.json").stat().st_size
    assert [leftover.freed for leftover in leftovers] == [5 + job + manifest, job]
    assert [remove(leftover, workspace) for leftover in leftovers] == [None] * 2
    assert list((workspace / "sft").iterdir()) == []
    assert (published / "weights").read_text() == "123456"


def test_a_directory_locked_after_the_survey_is_kept(make_work, workspace):
    directory = make_work("sft", "a")
    (leftover,) = survey(workspace, STAGES, [], {}, unfinished=False)[0]
    with recipe_lock(directory):
        assert remove(leftover, workspace).startswith(f"process {os.getpid()} since")
    assert (directory / "export" / "weights").is_file()


def test_interrupted_publications_are_removed_with_their_empty_folder(
    make_work, workspace, tmp_path
):
    partial = tmp_path / "models" / "v1" / "sft_model.99.partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_text("1234")
    (leftover,) = survey(workspace, STAGES, [], {partial: "interrupted"}, unfinished=False)[0]
    assert (leftover.why, leftover.freed) == ("interrupted", 4)
    remove(leftover, workspace)
    assert list((tmp_path / "models").iterdir()) == []


def test_downloaded_champions_are_removed_unless_a_stage_reads_them(make_work, workspace):
    names = ("a" * 48, "b" * 48, "tmpx/policy")  # the last one is not yet renamed
    old, read, _ = folders = [workspace / "champions" / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
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
