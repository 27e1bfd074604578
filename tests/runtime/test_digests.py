"""Digests of files, computed once and with heartbeats."""

import hashlib
import os

import pytest

from rlhf_pipeline.runtime import digests, heartbeat
from rlhf_pipeline.runtime.digests import FileEntry, file_digest, read_pieces, write_pieces
from rlhf_pipeline.runtime.heartbeat import Heartbeat

ABCDEFGH = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab"
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


def test_a_written_file_has_the_digest_of_its_bytes_and_is_not_read(tmp_path, reads):
    entry = write_pieces(tmp_path / "file", [b"abc", memoryview(b"defgh")])
    assert entry == FileEntry(8, ABCDEFGH)
    assert reads == []
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"
    assert file_digest(tmp_path / "file") == ABCDEFGH


def test_every_piece_is_a_heartbeat(tmp_path, pieces_of_four):
    write_pieces(tmp_path / "file", [b"abc", b"defgh"])
    assert heartbeat._here.ticks == 2
    assert list(read_pieces(tmp_path / "file")) == [b"abcd", b"efgh"]
    file_digest(tmp_path / "file")
    assert heartbeat._here.ticks == 4


def test_a_large_file_is_not_read_again_under_any_name(tmp_path, pieces_of_four, reads):
    write_pieces(tmp_path / "written", [b"abcdefgh"])
    (tmp_path / "written").rename(tmp_path / "renamed")
    assert FileEntry.of(tmp_path / "renamed") == FileEntry(8, ABCDEFGH)
    assert reads == []
    (tmp_path / "other").write_bytes(b"abcdefgh")
    for _ in range(2):
        assert FileEntry.of(tmp_path / "other") == FileEntry(8, ABCDEFGH)
    assert reads == ["other"]
    assert FileEntry(8, ABCDEFGH).matches(tmp_path / "other")  # a check always reads
    assert reads == ["other"] * 2


def test_a_changed_file_is_read_again(tmp_path, pieces_of_four, reads):
    write_pieces(tmp_path / "file", [b"abcdefgh"])
    modified = (tmp_path / "file").stat().st_mtime_ns
    while (tmp_path / "file").stat().st_mtime_ns == modified:  # the clock has ticks
        (tmp_path / "file").write_bytes(b"abcdefgi")
    assert FileEntry.of(tmp_path / "file").sha256 == hashlib.sha256(b"abcdefgi").hexdigest()
    assert reads == ["file"]


def test_a_small_file_is_always_read(tmp_path, reads):
    """It may change twice within a tick of the clock."""
    write_pieces(tmp_path / "file", [b"abcdefgh"])
    written = (tmp_path / "file").stat().st_mtime_ns
    (tmp_path / "file").write_bytes(b"abcdefgi")
    os.utime(tmp_path / "file", ns=(written, written))
    assert FileEntry.of(tmp_path / "file").sha256 == hashlib.sha256(b"abcdefgi").hexdigest()
    assert reads == ["file"]
