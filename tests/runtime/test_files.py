"""Files are written completely or not at all, and only if they fit. The full disk is real."""

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.files import require_space, write_atomically

PAGE = 4096


def test_a_file_is_replaced(tmp_path):
    file = tmp_path / "job.json"
    file.write_text("old")
    write_atomically(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    file = tmp_path / "job.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"


def test_a_write_to_a_full_disk_leaves_nothing(disk):
    file = disk.path / "job.json"
    file.write_text("old")
    disk.leave(0)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert {path.name for path in disk.path.iterdir()} == {"filler", "job.json"}


def test_a_write_that_does_not_fit_is_not_begun(disk):
    require_space(disk.path, 8 * 2**20 - PAGE, "the model")
    with pytest.raises(StageError) as caught:
        require_space(disk.path, 12 * 2**20, "the model")
    assert str(caught.value) == f"the model needs 12 MiB, {disk.path} has 8.0 MiB free"
