"""The devices and the environment of a launch, signals to the driver, and the end of a launch."""

import json
import os
import signal
import textwrap

import psutil
import pytest
from waiting import once, wait_until

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.metrics_file import truncate_after
from rlhf_pipeline.stages.job import Job, RunContext, StageListener, StageRun, StageSpec
from rlhf_pipeline.stages.launch import launcher
from rlhf_pipeline.stages.launch.launcher import _let_save, _MetricsTail, _signals_raise
from rlhf_pipeline.stages.run import StageRunner

PROGRAM = """
import json, os, signal, time
from pathlib import Path
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import run_program

SHOWN = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM", "LOCAL_RANK")

def main(job):
    folder = Path(__file__).parent
    rank = os.environ.get("RANK", "0")
    if (folder / "slow").exists():
        asked = []
        signal.signal(signal.SIGTERM, lambda *arguments: asked.append(1))
        heartbeat.at("update", 1)
        while not asked:
            time.sleep(0.01)
        (folder / f"asked-{rank}").touch()
        while not (folder / "release").exists():
            time.sleep(0.01)
        (folder / f"saved-{rank}").touch()
    seen = {name: os.environ.get(name) for name in SHOWN}
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    job.export.mkdir(exist_ok=True)
    return {}

if __name__ == "__main__":
    run_program(main)
"""
"""Each rank writes what it sees. If the file `slow` exists, it first waits for SIGTERM and for the
file `release`."""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs a stage whose ranks write what they see; returns that, by rank."""
    (tmp_path / "shown_program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*, distributed=True, **launch):
        spec = StageSpec("shown", "shown_program", libraries=(), distributed=distributed)
        context = RunContext(tmp_path / "ws", LaunchConfig(**launch))
        StageRunner(context).run(Job(spec, {}, {}, 1))
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("seen-*.json"))]

    return run


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
@pytest.mark.parametrize(
    ("visible", "accelerator", "expected"),
    [
        ("5,4", "cuda", "5,4"),
        ("GPU-8932f937,GPU-5a5d6", "cuda", "GPU-8932f937,GPU-5a5d6"),
        (None, "cuda", "0,1"),  # nvidia-smi lists three
        ("", "cpu", "-1,-1"),
    ],
)
def test_the_ranks_get_the_gpus_that_the_user_shows(
    stage, nvidia_smi, monkeypatch, visible, accelerator, expected
):
    nvidia_smi(3)
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert stage(processes=2) == [
        {
            "CUDA_VISIBLE_DEVICES": expected,
            "DS_ACCELERATOR": accelerator,
            "TOKENIZERS_PARALLELISM": "false",
            "LOCAL_RANK": rank,
        }
        for rank in ("0", "1")
    ]


def test_a_single_process_tokenizes_on_all_cores(stage, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (seen,) = stage(distributed=False)
    assert seen["TOKENIZERS_PARALLELISM"] is None


@pytest.mark.slow
def test_a_scheduler_that_ends_all_processes_lets_the_ranks_save(stage, tmp_path):
    """DeepSpeed's launcher would kill the ranks 30 seconds after SIGTERM."""
    (tmp_path / "slow").touch()
    heartbeats = "ws/shown/*/heartbeats/rank*.json"

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
        stage(processes=2, grace_s=600)
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
        self.heartbeats = {0: Heartbeat(0, 1, self.phase, 3, ticks=ticks)}
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
    _let_save(ranks, "sft", 10.0)
    assert ranks.now == pytest.approx(waited, abs=0.2)
    assert ranks.sent == [(0, signal.SIGTERM)]


def test_a_warning_says_why_a_signal_is_not_obeyed_at_once(monkeypatch, caplog):
    _let_save(Saving(monkeypatch, ends=0.5), "sft", 120.0)
    assert caplog.text == ""
    _let_save(Saving(monkeypatch, ends=5.0), "sft", 120.0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "stage sft: the ranks finish their step and write a checkpoint, for at most 120 s "
        "(launch.grace_s); a second Ctrl-C kills them"
    )


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts its command
    try:
        with _signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
