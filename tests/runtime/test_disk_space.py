"""A full disk, from the driver's side: a real one in memory, and a stage that costs half a second."""

import json
import os
import re
import shutil

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.checkpoint_files import checkpoint_path, seal
from rlhf_pipeline.runtime.disk_space import explain_full_disk, require_space
from rlhf_pipeline.runtime.program import REASON_BYTES
from rlhf_pipeline.stages.cache.cleaning import remove, survey

PAGE = 4096


@pytest.fixture
def small(disk, drill):
    """The stage `drill` on the small disk; its program writes as many bytes as `size` says."""
    drill.program = drill.root / "drill_program.py"
    drill.program.write_text(
        drill.program.read_text().replace(
            'f"launch {number}"', '"x" * int((orders / "size").read_text())'
        )
    )
    (drill.root / "size").write_text("1")
    drill.workspace = disk.path / "workspace"
    drill.workspace.mkdir()
    (drill.root / "workspace").symlink_to(drill.workspace)
    return drill


def test_a_disk_that_is_full_before_the_stage_begins(small, disk):
    disk.leave(0)
    with pytest.raises(
        StageError, match=r"^stage drill: \[Errno 28\] No space left on device"
    ) as caught:
        small.run()
    assert caught.value.cause == "disk full"
    assert re.search(
        r"^  room     0 of 8.0 MiB are left on the file system of ", str(caught.value), re.MULTILINE
    )
    assert "`df -h`" in str(caught.value) and "  again    the same command" in str(caught.value)
    assert small.launches == 0
    disk.make_room()
    assert (small.run() / "result").read_text() == "x"


def test_a_program_that_fills_the_disk_has_room_for_its_reason(small, disk):
    (small.root / "size").write_text(str(16 * 2**20))
    with pytest.raises(
        StageError, match=r"^stage drill failed after .*\nrank0: Traceback"
    ) as caught:
        small.run()
    assert caught.value.cause == "disk full"
    assert "OSError: [Errno 28] No space left on device" in str(caught.value)
    assert re.search(r"^  room     0.0 of 8.0 MiB are left", str(caught.value), re.MULTILINE)
    (directory,) = (small.workspace / "drill").iterdir()
    assert not (directory / "export" / "manifest.json").exists()
    (small.root / "size").write_text("2")
    assert (small.run() / "result").read_text() == "xx"  # what the failed attempt left is gone


def test_a_reason_that_was_never_written_is_guessed_from_the_disk(small, disk):
    """As where a library prints while it is imported: the program ends before it has begun."""
    text = (
        "import os, sys\nopen(os.path.dirname(sys.argv[1]) + '/rest', 'wb').write(bytes(2**24))\n"
    )
    small.program.write_text(text + small.program.read_text())
    with pytest.raises(
        StageError, match="no rank left a reason: No space left on device"
    ) as caught:
        small.run()
    assert caught.value.cause == "disk full"


def test_what_is_kept_for_reasons_is_no_reason(small):
    directory = small.run().parent
    (reserve,) = (directory / "errors").iterdir()
    assert reserve.suffix == ".reserve" and reserve.stat().st_blocks * 512 >= REASON_BYTES


def test_job_and_recipe_are_whole_or_absent(small, disk):
    """The commands that make room read them."""
    (small.root / "fail").touch()
    with pytest.raises(StageError):
        small.run()
    (directory,) = (small.workspace / "drill").iterdir()
    before = {name: (directory / name).read_text() for name in ("job.json", "recipe.json")}
    disk.leave(0)
    with pytest.raises(StageError, match="No space left on device"):
        small.run()
    assert {name: (directory / name).read_text() for name in before} == before
    assert json.loads(before["job.json"])["stage"] == "drill"


def test_room_is_made_on_a_full_disk(small, disk):
    (small.root / "fail").touch()
    with pytest.raises(StageError):
        small.run()
    (record,) = small.workspace.glob(".locks/*.json")
    record.write_text(
        record.read_text().replace(str(os.getpid()), "1")
    )  # somebody who is gone ran it
    disk.leave(0)
    leftovers, _ = survey(small.workspace, [], [], unfinished=False)
    assert [remove(leftover, small.workspace) for leftover in leftovers] == [None]
    assert shutil.disk_usage(disk.path).free >= PAGE


def test_half_written_checkpoints_of_an_earlier_attempt_make_room(small):
    (small.root / "fail").touch()
    with pytest.raises(StageError):
        small.run()
    (directory,) = (small.workspace / "drill").iterdir()
    whole = checkpoint_path(directory / "checkpoints", 5)
    for folder in (
        whole,
        directory / "checkpoints" / "step-00000007.partial",
        directory / "checkpoints/ema/best.partial",
    ):
        folder.mkdir(parents=True)
    seal(whole)
    with pytest.raises(StageError):
        small.run()
    assert not list(directory.rglob("*.partial"))
    assert whole.is_dir()


def test_other_errors_of_the_system_pass(tmp_path):
    with pytest.raises(FileNotFoundError), explain_full_disk("stage sft", tmp_path):
        (tmp_path / "nothing").read_text()


def test_what_does_not_fit_is_not_begun(disk):
    require_space(disk.path, 8 * 2**20 - PAGE, "the model")
    with pytest.raises(StageError) as caught:
        require_space(disk.path, 12 * 2**20, "the model", ": it goes on")
    assert str(caught.value) == (
        f"the model takes 12 MiB, and {disk.path} has 8.0 MiB left; make room and run the same command again: it goes on"
    )
