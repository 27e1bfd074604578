"""Heartbeats cost few writes and are never truncated."""

import os
import time

import pytest
from waiting import HANGS_S, wait_until

from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat, read_heartbeats


@pytest.fixture(autouse=True)
def _nothing_reported_yet(monkeypatch):
    monkeypatch.setattr(heartbeat, "_here", Heartbeat(0, None))
    monkeypatch.setattr(heartbeat, "_file", None)
    monkeypatch.setenv(heartbeat.LAUNCH, "driver and directory")


def test_a_phase_is_written_when_it_begins(tmp_path, monkeypatch):
    """A rank that is killed in step 7 is not reported in the step that it was in a second ago.

    The first test of this file: writers of other tests would take its events.
    """
    monkeypatch.setattr(heartbeat, "WRITE_EVERY_S", HANGS_S)
    heartbeat.start(tmp_path, 0)
    for step in (1, 7):
        heartbeat.begin_phase("rollout", step)
        heartbeat.begin_phase("scoring")
        wait_until(
            lambda step=step: f"scoring of step {step} " in str(read_heartbeats(tmp_path)[0])
        )


def test_a_rank_reports_as_soon_as_it_starts_and_ends(tmp_path, monkeypatch):
    """A program that was started by hand reports no process id."""
    heartbeat.start(tmp_path, 3)
    found = read_heartbeats(tmp_path)[3]
    assert (found.rank, found.phase, found.step, found.phases) == (3, "loading", None, 0)
    assert found.pid == os.getpid()
    heartbeat.begin_phase("finished")
    assert read_heartbeats(tmp_path)[3].phase == "finished"
    monkeypatch.delenv(heartbeat.LAUNCH)
    heartbeat.start(tmp_path, 4)
    assert read_heartbeats(tmp_path)[4].pid is None


def test_phases_and_many_ticks_cost_few_writes(tmp_path):
    heartbeat.start(tmp_path, 0)
    heartbeat.begin_phase("rollout", 7)
    heartbeat.report_progress()
    heartbeat.begin_phase("update")
    begun, before = time.monotonic(), heartbeat._writes
    while time.monotonic() < begun + 1.5:
        heartbeat.report_progress()
    ticks, writes = heartbeat._here.pieces, heartbeat._writes - before
    assert ticks > 100 * writes
    wait_until(lambda: read_heartbeats(tmp_path)[0].pieces == ticks)
    found = read_heartbeats(tmp_path)[0]
    assert (found.phase, found.step, found.phases) == ("update", 7, 2)
    assert str(found).startswith("update of step 7 since ")
