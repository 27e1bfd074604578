"""A full disk as the driver sees it: a real one in memory, and a stage of half a second."""

import json
import os
import re
import shutil

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.job import checkpoint_path, seal
from rlhf_pipeline.stages.cache.workspace import remove, survey
from rlhf_pipeline.stages.launch.failure import explain_full_disk

PAGE = 4096


@pytest.fixture
def small(disk, drill):
    """The stage `drill` on the small disk; its program writes the number of bytes in `size`."""
    program, written = drill.root / "drill_program.py", '"x" * int((orders / "size").read_text())'
    program.write_text(program.read_text().replace('f"launch {number}"', written))
    (drill.root / "size").write_text("1")
    drill.workspace = disk.path / "workspace"
    drill.workspace.mkdir()
    (drill.root / "workspace").symlink_to(drill.workspace)
    return drill


@pytest.fixture
def failed(small, in_this_process):
    """The work directory of an attempt that failed; the next one fails as well."""
    directory = small.fail()
    small.order("fail")
    return directory


def test_a_disk_that_is_full_before_the_stage_begins(small, disk):
    disk.leave(0)
    with pytest.raises(StageError) as caught:
        small.run()
    message = str(caught.value)
    assert message.startswith("stage drill: [Errno 28] No space left on device")
    assert "\n  space    0 of 8.0 MiB are free on the file system of " in message
    assert "`df -h`" in message and "  again    the same command" in message
    assert small.launches == 0
    disk.make_room()
    assert (small.run() / "result").read_text() == "x"


def test_a_program_that_fills_the_disk_is_reported_without_its_reason(small, disk):
    """The program cannot write its reason."""
    (small.root / "size").write_text(str(16 * 2**20))
    with pytest.raises(StageError) as caught:
        small.run()
    for pattern in (
        r"\Astage drill failed after .*\n.*: No space left on device",
        r"^  space    0(\.0)? of 8.0 MiB are free",
        r"^  fix      .*`df -h`",
    ):
        assert re.search(pattern, str(caught.value), re.MULTILINE)
    (directory,) = (small.workspace / "drill").iterdir()
    assert not (directory / "export" / "manifest.json").exists()
    (small.root / "size").write_text("2")
    assert (small.run() / "result").read_text() == "xx"  # the failed attempt's files are removed


def test_job_and_recipe_are_never_truncated(small, disk, failed):
    """The commands that free space read them."""
    before = {name: (failed / name).read_text() for name in ("job.json", "recipe.json")}
    disk.leave(0)
    with pytest.raises(StageError, match="No space left on device"):
        small.run()
    assert {name: (failed / name).read_text() for name in before} == before
    assert json.loads(before["job.json"])["stage"] == "drill"


def test_leftovers_are_removed_on_a_full_disk(small, disk, failed):
    (record,) = small.workspace.glob(".locks/*.json")
    # Another process, which has ended, ran the stage.
    record.write_text(record.read_text().replace(str(os.getpid()), "1"))
    disk.leave(0)
    leftovers, _ = survey(small.workspace, ["drill"], [], {}, unfinished=False)
    assert [remove(leftover, small.workspace) for leftover in leftovers] == [None]
    assert shutil.disk_usage(disk.path).free >= PAGE


def test_incomplete_checkpoints_of_an_earlier_attempt_are_removed(small, failed):
    checkpoints = failed / "checkpoints"
    complete = checkpoint_path(checkpoints, 5)
    for name in (complete.name, "step-00000007.partial", "ema/best.partial"):
        (checkpoints / name).mkdir(parents=True)
    seal(complete, {})
    with pytest.raises(StageError):
        small.run()
    assert not list(failed.rglob("*.partial"))
    assert complete.is_dir()


def test_other_errors_of_the_system_are_not_changed(tmp_path):
    with pytest.raises(FileNotFoundError), explain_full_disk("stage sft", tmp_path):
        (tmp_path / "nothing").read_text()
