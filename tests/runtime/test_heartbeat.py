"""Heartbeats cost few writes and are never truncated."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from waiting import HANGS_S, wait_until

from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats


class Beating:
    """A rank that reports into a directory; its writer sleeps until the test wakes it."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.sleeps, self.writes = [], 0
        self._others = threading.enumerate()  # earlier tests may have left writers
        self._asleep, self._awake = threading.Semaphore(0), threading.Semaphore(0)
        write = heartbeat._write

        def count(path, beat):
            self.writes += path.is_relative_to(directory)
            write(path, beat)

        monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
        monkeypatch.setattr(heartbeat, "_file", None)
        monkeypatch.setattr(heartbeat, "_write", count)
        at_once = SimpleNamespace(wait=lambda _: None, set=lambda: None, clear=lambda: None)
        monkeypatch.setattr(heartbeat, "_begun", at_once)
        clock = SimpleNamespace(**vars(time) | {"sleep": self._sleep})
        monkeypatch.setattr(heartbeat, "time", clock)
        monkeypatch.setenv(heartbeat.LAUNCH, "driver and directory")
        heartbeat.start(directory, 3)
        assert self._asleep.acquire(timeout=HANGS_S)

    def wake(self):
        """Let the writer wake once; return when it sleeps again."""
        self._awake.release()
        assert self._asleep.acquire(timeout=HANGS_S)

    @property
    def found(self):
        return read_heartbeats(self.directory)[3]

    def _sleep(self, seconds):
        if threading.current_thread() in self._others:
            return time.sleep(seconds)
        self.sleeps.append(seconds)
        self._asleep.release()
        self._awake.acquire()


@pytest.fixture
def beating(tmp_path, monkeypatch):
    return Beating(tmp_path, monkeypatch)


def test_a_rank_reports_as_soon_as_it_starts(beating):
    found = beating.found
    assert (found.rank, found.pid, found.phase, found.step, found.marks) == (
        3,
        os.getpid(),
        "loading",
        None,
        0,
    )


def test_phases_and_ticks_are_written_when_the_writer_wakes(beating):
    heartbeat.at("rollout", 7)
    heartbeat.tick()
    heartbeat.tick()
    heartbeat.at("update")
    heartbeat.tick()
    beating.wake()
    found = beating.found
    assert (found.phase, found.step, found.marks, found.ticks) == ("update", 7, 2, 1)
    assert str(found).startswith("update of step 7 since ")


def test_the_end_is_written_at_once(beating):
    heartbeat.at("finished")
    assert beating.found.phase == "finished"


def test_many_ticks_cost_one_write_a_second(beating):
    assert beating.writes == 1  # the start
    for second in (1, 2):
        for _ in range(1000):
            heartbeat.tick()
        assert beating.writes == second
        beating.wake()
        assert (beating.writes, beating.found.ticks) == (second + 1, second * 1000)
    beating.wake()
    assert beating.writes == 4  # a rank that waits reports, too
    assert beating.sleeps == [0.1] * 4


def test_a_phase_is_written_when_it_begins(tmp_path, monkeypatch):
    """A rank that is killed in step 7 is not reported in the step that it was in a second ago."""
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    monkeypatch.setattr(heartbeat, "_file", None)
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", HANGS_S)
    heartbeat.start(tmp_path, 0)
    heartbeat.at("rollout", 1)
    heartbeat.at("scoring")
    wait_until(lambda: read_heartbeats(tmp_path)[0].step == 1)
    heartbeat.at("rollout", 7)
    heartbeat.at("scoring")
    wait_until(lambda: str(read_heartbeats(tmp_path)[0]).startswith("scoring of step 7 since "))


def test_a_file_that_a_library_writes_ticks_while_it_grows(tmp_path, monkeypatch):
    """Without growth there is no tick: a write that hangs is not progress."""
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", 0.01)
    (tmp_path / "earlier").write_bytes(bytes(100))
    with heartbeat.while_writing(tmp_path), (tmp_path / "model").open("wb", buffering=0) as file:
        file.truncate(2**23)  # reserved, not written
        time.sleep(0.2)
        ticks = heartbeat._here.ticks
        assert ticks <= 1  # the file appeared
        for _ in range(2000):  # at most 8 MiB
            if heartbeat._here.ticks >= ticks + 3:
                break
            file.write(bytes(2**12))
            time.sleep(0.01)
        assert heartbeat._here.ticks >= ticks + 3
    ticks = heartbeat._here.ticks
    (tmp_path / "later").write_bytes(bytes(2**16))
    time.sleep(0.2)
    assert heartbeat._here.ticks == ticks


def test_a_rank_on_another_machine_reports_no_process_id(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    monkeypatch.setattr(heartbeat, "_file", None)
    heartbeat.start(tmp_path, 0)
    assert json.loads((tmp_path / "heartbeats" / "rank0.json").read_text())["pid"] is None
