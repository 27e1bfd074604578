"""Disk space: checked before a write, explained after a failure. The full disks are real."""

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.disk_space import explain_full_disk, is_full, require_space

PAGE = 4096


def test_other_errors_of_the_system_are_not_changed(tmp_path):
    with pytest.raises(FileNotFoundError), explain_full_disk("stage sft", tmp_path):
        (tmp_path / "nothing").read_text()


def test_a_write_that_does_not_fit_is_not_begun(disk):
    require_space(disk.path, 8 * 2**20 - PAGE, "the model")
    with pytest.raises(StageError) as caught:
        require_space(disk.path, 12 * 2**20, "the model", ": it resumes")
    assert str(caught.value) == (
        f"the model needs 12 MiB, {disk.path} has 8.0 MiB free; free some space and run the same "
        "command again: it resumes"
    )


def test_a_disk_is_full_if_a_small_file_does_not_fit(disk):
    assert not is_full(disk.path)
    disk.leave(2 * PAGE)
    assert is_full(disk.path)
    assert list(disk.path.iterdir()) == [disk.filler]
