"""Files are written completely or not at all."""

import pytest

from rlhf_pipeline.runtime.files import write_atomically


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
