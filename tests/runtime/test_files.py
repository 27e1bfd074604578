"""Files are written completely or not at all, and only if they fit. The full disk is real."""

import os
import shutil
from pathlib import Path

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import files
from rlhf_pipeline.runtime.files import put_in_place, require_space, write_atomically

PAGE = 4096


def test_a_file_is_replaced_or_kept(tmp_path):
    file = tmp_path / "job.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    write_atomically(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_write_to_a_full_disk_leaves_nothing(disk):
    file = disk.path / "job.json"
    file.write_text("old")
    disk.leave(0)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert {path.name for path in disk.path.iterdir()} == {"filler", "job.json"}


@pytest.fixture
def happened(monkeypatch):
    """The names that are forced to the disk, renamed and removed, in order."""
    found = []

    def record(module, name, shown):
        real = getattr(module, name)

        def call(*arguments, **options):
            found.append(shown(arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    record(os, "fsync", lambda a: f"force {Path(f'/proc/self/fd/{a[0]}').readlink().name}")
    record(os, "replace", lambda a: f"rename {Path(a[0]).name}")
    record(shutil, "rmtree", lambda a: f"remove {Path(a[0]).name}")
    return found


def test_a_file_is_on_the_disk_before_it_replaces_another_one(tmp_path, happened):
    write_atomically(tmp_path / "job.json", "new")
    assert happened[:2] == ["force .job.json.partial", f"force {tmp_path.name}"]
    assert happened[2:] == ["rename .job.json.partial", f"force {tmp_path.name}"]
    happened.clear()
    write_atomically(tmp_path / "rank0.json", "a heartbeat", force=False)
    assert happened == ["rename .rank0.json.partial"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_its_place_and_the_earlier_one_goes_last(
    tmp_path, happened, monkeypatch, can_exchange
):
    """At once by an exchange of names; on NFS, which has none, the earlier one is kept beside."""
    if not can_exchange:
        monkeypatch.setattr(files, "_exchanged", lambda one, other: False)
    target = tmp_path / "best"
    for name in ("best", "best.partial"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "weights").write_text(name)
    put_in_place(tmp_path / "best.partial", target)
    assert (target / "sub" / "weights").read_text() == "best.partial"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert set(happened[:3]) == {"force weights", "force sub", "force best.partial"}
    parent = f"force {tmp_path.name}"
    moved = ["remove best.outgoing", "rename best.partial"]  # the first left by an earlier end
    assert happened[3:] == (
        [parent, parent, "remove best.partial"]
        if can_exchange
        else [parent, *moved, parent, "remove best.outgoing"]
    )


def test_a_file_does_not_replace_a_folder(tmp_path):
    for name in ("page", "page.outgoing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("work")
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "page", "<p>")
    write_atomically(tmp_path / "page.outgoing" / "mine", "new")
    assert (tmp_path / "page" / "mine").read_text() == "work"


def test_a_write_that_does_not_fit_is_not_begun(disk):
    require_space(disk.path, 8 * 2**20 - PAGE, "the model")
    with pytest.raises(StageError) as caught:
        require_space(disk.path, 12 * 2**20, "the model")
    assert str(caught.value) == f"the model needs 12 MiB, {disk.path} has 8.0 MiB free"
