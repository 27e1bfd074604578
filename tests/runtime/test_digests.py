"""Digests of files, computed once and with heartbeats."""

import hashlib
import os

import pytest

from rlhf_pipeline.runtime import digests, heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import FileEntry, file_digest, read_pieces, write_pieces

ENTRY = FileEntry(8, "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab")
"""printf abcdefgh | sha256sum"""


@pytest.fixture
def pieces_of_four(monkeypatch):
    """A file of four bytes is large."""
    monkeypatch.setattr(digests, "PIECE", 4)
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that are read for their digest."""
    found, read = [], digests.file_digest

    def count(path):
        found.append(path.name)
        return read(path)

    monkeypatch.setattr(digests, "file_digest", count)
    return found


def test_a_written_file_has_the_digest_of_its_bytes_and_is_not_read(
    tmp_path, pieces_of_four, reads
):
    """Every piece is a heartbeat."""
    assert write_pieces(tmp_path / "file", [b"abc", memoryview(b"defgh")]) == ENTRY
    assert reads == [] and heartbeat._here.ticks == 2
    assert list(read_pieces(tmp_path / "file")) == [b"abcd", b"efgh"]
    assert file_digest(tmp_path / "file") == ENTRY.sha256
    assert heartbeat._here.ticks == 4


def test_a_large_file_is_not_read_again_under_any_name(tmp_path, pieces_of_four, reads):
    write_pieces(tmp_path / "written", [b"abcdefgh"])
    (tmp_path / "written").rename(tmp_path / "renamed")
    assert FileEntry.of(tmp_path / "renamed") == ENTRY
    assert reads == []
    (tmp_path / "other").write_bytes(b"abcdefgh")
    for _ in range(2):
        assert FileEntry.of(tmp_path / "other") == ENTRY
    assert reads == ["other"]
    assert ENTRY.matches(tmp_path / "other")  # a check always reads
    assert reads == ["other"] * 2


@pytest.mark.parametrize("is_large", [True, False])
def test_a_changed_file_is_read_again(tmp_path, monkeypatch, reads, is_large):
    """A small one may change twice within a tick of the clock."""
    monkeypatch.setattr(digests, "PIECE", 4 if is_large else 99)
    write_pieces(tmp_path / "file", [b"abcdefgh"])
    written = (tmp_path / "file").stat().st_mtime_ns
    (tmp_path / "file").write_bytes(b"abcdefgi")
    os.utime(tmp_path / "file", ns=(written, written + is_large))
    assert FileEntry.of(tmp_path / "file").sha256 == hashlib.sha256(b"abcdefgi").hexdigest()
    assert reads == ["file"]
