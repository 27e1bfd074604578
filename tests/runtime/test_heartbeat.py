"""Heartbeats cost few writes and are never truncated."""

import json
import os
import time

import pytest

from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats


@pytest.fixture
def beating(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    monkeypatch.setattr(heartbeat, "_file", None)
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", 0.05)
    heartbeat.start(tmp_path, 3, local=True)
    return tmp_path


def test_a_rank_reports_as_soon_as_it_starts(beating):
    found = read_heartbeats(beating)[3]
    assert (found.rank, found.pid, found.phase, found.step, found.marks) == (
        3,
        os.getpid(),
        "loading",
        None,
        0,
    )


def test_phases_and_ticks_are_written_soon_after(beating):
    heartbeat.at("rollout", 7)
    heartbeat.tick()
    heartbeat.tick()
    heartbeat.at("update")
    heartbeat.tick()
    time.sleep(0.5)
    found = read_heartbeats(beating)[3]
    assert (found.phase, found.step, found.marks, found.ticks) == ("update", 7, 2, 1)
    assert str(found).startswith("update of step 7 since ")


def test_the_end_is_written_at_once(beating, monkeypatch):
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", 60.0)
    heartbeat.at("finished")
    assert read_heartbeats(beating)[3].phase == "finished"


def test_many_ticks_cost_few_writes(beating):
    before = (beating / "heartbeats" / "rank3.json").stat().st_mtime_ns
    writes = 0
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        heartbeat.tick()
        now = (beating / "heartbeats" / "rank3.json").stat().st_mtime_ns
        writes, before = writes + (now != before), now
    assert 1 <= writes <= 10  # 0.5 s at one in 0.05 s


def test_a_rank_on_another_machine_reports_no_process_id(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_file", None)
    heartbeat.start(tmp_path, 0, local=False)
    assert json.loads((tmp_path / "heartbeats" / "rank0.json").read_text())["pid"] is None
