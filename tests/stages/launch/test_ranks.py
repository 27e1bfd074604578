"""Ranks as the driver sees them, from heartbeats and the table of processes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.launch import ranks as module
from rlhf_pipeline.stages.launch.ranks import Ranks


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when it is set."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def sleeper():
    started = []

    def start():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
        started.append(process)
        return process

    yield start
    for process in started:
        end(process)


def end(process):
    process.kill()
    process.wait()


def beat(directory, rank, **fields):
    (directory / "heartbeats").mkdir(exist_ok=True)
    heartbeat = Heartbeat(**{"rank": rank, "pid": None, "since": 1.0, "progressed": 1.0} | fields)
    (directory / "heartbeats" / f"rank{rank}.json").write_text(json.dumps(asdict(heartbeat)))


def test_the_watchdog_waits_five_minutes_for_a_start_and_for_progress_of_any_rank(tmp_path, clock):
    ranks = Ranks(tmp_path, 2, 10.0, None)
    clock[0] += 299
    ranks.update()
    assert not ranks.stuck
    clock[0] += 2
    assert ranks.stuck
    for seconds, rank in ((0, 0), (9, 1), (9, 0)):
        clock[0] += seconds
        beat(tmp_path, rank, pieces=int(clock[0]))
        ranks.update()
        assert not ranks.stuck
    clock[0] += 11
    ranks.update()
    assert ranks.stuck
    assert not Ranks(tmp_path, 2, None, None).stuck


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"phases": 7, "pieces": 9}, {"phases": 8, "pieces": 0}),  # a phase behind
        ({"pieces": 2, "progressed": 2.0}, {"pieces": 3}),  # a micro batch behind
        ({"progressed": 1.0}, {"progressed": 2.0}),  # the first to stop
    ],
)
def test_the_rank_behind_is_named(tmp_path, one, other):
    for rank, fields in ((0, other), (1, one)):
        beat(tmp_path, rank, **{"phase": "update", "step": 7, "phases": 8, "pieces": 3} | fields)
    ranks = Ranks(tmp_path, 2, 10.0, None)
    ranks.update()
    assert ranks.describe().startswith("rank 1 is behind, in update of step 7 since ")


def test_a_rank_that_did_not_start_is_behind(tmp_path):
    beat(tmp_path, 0)
    ranks = Ranks(tmp_path, 2, 10.0, None)
    ranks.update()
    assert ranks.describe().startswith("rank 1 did not start\n  rank 0: loading since ")


def test_the_signal_that_ended_a_rank_is_known_until_it_is_reaped(tmp_path, sleeper):
    victim, healthy = sleeper(), sleeper()
    beat(tmp_path, 0, pid=healthy.pid)
    beat(tmp_path, 1, pid=victim.pid)
    ranks = Ranks(tmp_path, 2, None, None)
    ranks.update()
    assert ranks.deaths == {} and ranks.failed_s == 0 and ranks.alive == [0, 1]
    victim.send_signal(signal.SIGBUS)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # ended, but not reaped
    ranks.update()
    assert {rank: death.status for rank, death in ranks.deaths.items()} == {1: -signal.SIGBUS}
    assert ranks.alive == [0]
    assert ranks.failed_s > 0
    end(healthy)
    ranks.update()
    assert ranks.deaths[0].status is None  # it has been reaped


@pytest.mark.parametrize("last_words", ["finished", "report"])
def test_a_rank_that_finished_or_left_a_reason_is_not_a_death(tmp_path, sleeper, last_words):
    victim = sleeper()
    beat(tmp_path, 0, pid=victim.pid)
    ranks = Ranks(tmp_path, 1, None, None)
    ranks.update()
    if last_words == "finished":
        beat(tmp_path, 0, pid=victim.pid, phase="finished")
    else:
        (tmp_path / "errors").mkdir()
        (tmp_path / "errors" / "1-rank0.txt").write_text("ValueError")
    end(victim)
    ranks.update()
    assert ranks.deaths == {}
    assert (ranks.failed_s > 0) == (last_words == "report")


def test_ranks_are_finished_when_each_has_said_so_and_has_ended(tmp_path, sleeper):
    process = sleeper()
    ranks = Ranks(tmp_path, 2, 10.0, None)
    ranks.update()
    assert not ranks.finished
    beat(tmp_path, 0, phase="finished")
    ranks.update()
    assert not ranks.finished
    beat(tmp_path, 1, phase="finished", pid=process.pid)
    ranks.update()
    assert not ranks.finished
    end(process)
    assert ranks.finished


def test_a_machine_whose_ranks_are_all_silent_is_lost(tmp_path, clock):
    """The clock of this process counts, so those of the machines may differ."""
    ranks = Ranks(tmp_path, 4, 3600.0, Pulse(tmp_path, 30.0, {}))
    places = {0: "", 1: "worker-1/7", 2: "worker-1/7", 3: "worker-2/7"}

    def report(beats):
        for rank, number in enumerate(beats):
            beat(tmp_path, rank, pid=os.getpid(), sequence=number, machine=places[rank])
        ranks.update()

    report([1, 1, 1, 1])
    clock[0] += 20
    report([1, 1, 2, 2])
    clock[0] += 20
    report([1, 1, 2, 3])  # rank 0 runs here, so its process counts
    assert ranks.lost is None and ranks.deaths.keys() == {1}
    clock[0] += 20
    report([1, 1, 2, 4])
    assert ranks.lost == (
        "node worker-1 (ranks 1, 2) is lost: it has been silent for 30 s (launch.node_timeout_s)"
    )
    assert not ranks.stuck


@pytest.mark.parametrize("phase", ["finished", "failed", "interrupted"])
def test_a_machine_whose_ranks_have_ended_is_not_lost(tmp_path, clock, phase):
    ranks = Ranks(tmp_path, 1, None, Pulse(tmp_path, 30.0, {}))
    beat(tmp_path, 0, pid=1, phase=phase, machine="worker-1/7")
    ranks.update()
    clock[0] += 60
    ranks.update()
    assert ranks.lost is None and ranks.alive == [] and ranks.deaths == {}
