"""Signals to the driver, and the end of a launch."""

import json
import os
import signal

import psutil
import pytest
from waiting import once, wait_until

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.metrics_file import truncate_after
from rlhf_pipeline.stages.job import Job, RunContext, StageListener, StageRun, StageSpec
from rlhf_pipeline.stages.launch import launcher
from rlhf_pipeline.stages.launch.launcher import _MetricsTail, _signals_raise, _wait_for_checkpoint
from rlhf_pipeline.stages.run import StageRunner

pytestmark = pytest.mark.cold

PROGRAM = """
import os, signal, time
from pathlib import Path
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import run_program

def main(job):
    folder = Path(__file__).parent
    rank = os.environ.get("RANK", "0")
    asked = []
    signal.signal(signal.SIGTERM, lambda *arguments: asked.append(1))
    heartbeat.begin_phase("update", 1)
    while not asked:
        time.sleep(0.01)
    (folder / f"asked-{rank}").touch()
    while not (folder / "release").exists():
        time.sleep(0.01)
    (folder / f"saved-{rank}").touch()
    job.export.mkdir(exist_ok=True)
    return {}

if __name__ == "__main__":
    run_program(main)
"""
"""Each rank waits for SIGTERM, and then for the file `release`."""


def test_the_lines_of_an_earlier_attempt_are_not_new(tmp_path):
    """Step 3 was lost with the attempt: training resumes from step 2 and takes it again."""
    passed = []
    listener = StageListener()
    listener.stage_metrics = lambda run, records: passed.extend(each["step"] for each in records)
    run = StageRun("sft", "f", 1, {}, {}, {}, tmp_path, 60.0)
    run.metrics_file.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    tail = _MetricsTail(run, listener)
    tail.forward()
    assert passed == []
    truncate_after(run.metrics_file, 2)  # by the program
    with run.metrics_file.open("a") as file:
        for step in (3, 4):
            file.write(f'{{"step": {step}}}\n')
            file.flush()
            tail.forward()
    assert passed == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_scheduler_that_ends_all_processes_lets_the_ranks_save(tmp_path, monkeypatch):
    """DeepSpeed's launcher would kill the ranks 30 seconds after SIGTERM."""
    (tmp_path / "slow_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heartbeats = "ws/slow/*/heartbeats/rank*.json"

    def running():
        phases = [json.loads(path.read_text())["phase"] for path in tmp_path.glob(heartbeats)]
        return phases == ["update", "update"]

    def end_all():
        for process in psutil.Process().children(recursive=True):
            process.terminate()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: len(list(tmp_path.glob("asked-*"))) == 2)
        (tmp_path / "release").touch()

    with once(running, end_all), pytest.raises(Interrupted, match="SIGTERM"):
        context = RunContext(tmp_path / "ws", LaunchConfig(processes=2, grace_s=600))
        StageRunner(context).run(Job(StageSpec("slow", "slow_program", libraries=()), {}, {}, 1))
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert "Killing subprocess" not in next(tmp_path.rglob("program.log")).read_text()


class Saving:
    """One rank that ends at a moment, or never, and makes progress in a phase until another one."""

    def __init__(self, monkeypatch, phase="update", progresses_until=0.0, ends=float("inf")):
        self.phase, self.progresses_until, self.ends = phase, progresses_until, ends
        self.now, self.heartbeats, self.sent = 0.0, {}, []
        monkeypatch.setattr(launcher.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(launcher.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        ticks = int(min(self.now, self.progresses_until))
        self.heartbeats = {0: Heartbeat(0, 1, self.phase, 3, pieces=ticks)}
        return [0] if self.now < self.ends else []

    def send(self, rank, number):
        self.sent.append((rank, number))


@pytest.mark.parametrize(
    ("rank", "waited"),
    [
        ({"ends": 2.0}, 2),
        ({}, 10),
        ({"progresses_until": 25.0}, 10),  # of its step
        ({"phase": "saving", "progresses_until": 25.0}, 35),
        ({"phase": "saving", "progresses_until": 25.0, "ends": 24.0}, 24),
    ],
)
def test_ranks_that_save_get_time_as_long_as_they_make_progress(monkeypatch, rank, waited):
    ranks = Saving(monkeypatch, **rank)
    _wait_for_checkpoint(ranks, "sft", 10.0)
    assert ranks.now == pytest.approx(waited, abs=0.2)
    assert ranks.sent == [(0, signal.SIGTERM)]


def test_a_warning_says_why_a_signal_is_not_obeyed_at_once(monkeypatch, caplog):
    _wait_for_checkpoint(Saving(monkeypatch, ends=0.5), "sft", 120.0)
    assert caplog.text == ""
    _wait_for_checkpoint(Saving(monkeypatch, ends=5.0), "sft", 120.0)
    assert caplog.messages == [
        "stage sft: the ranks finish their step and write a checkpoint, for at most 120 s "
        "(launch.grace_s); a second Ctrl-C kills them"
    ]


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts its command
    try:
        with _signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
