"""Running stages: progress, failures that explain themselves, less memory, signals."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from waiting import once, wait_until

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.errors import Interrupted, StageError
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages import run
from rlhf_pipeline.stages.job import Job, RunContext, StageListener, StageSpec
from rlhf_pipeline.stages.run import StageRunner

SPEC = StageSpec("toy", "toy_program", distributed=False)


class ToyConfig(Block):
    """What the toy stage does."""

    action: str = "work"
    """work, fail, explain or sleep."""


PROGRAM = """
import json, sys, time
from pathlib import Path
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import run_program

def main(job):
    action = job.config["toy"]["action"]
    with job.metrics_file.open("a") as file:
        for step in (1, 2, 3):
            record = {"step": step, "total_steps": 3, "time": 0.0, "metrics": {"loss": 1 / step}}
            file.write(json.dumps(record) + "\\n")
    if action == "fail":
        raise RuntimeError("the cause")
    if action == "explain":
        raise DataError("rows.jsonl:3: no chosen answer")
    if action == "sleep":
        import subprocess
        mark = str(Path(__file__).with_name("child"))
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)", mark])
        time.sleep(900)
    job.export.mkdir()
    (job.export / "result").write_text("done")
    return {"loss": 0.25}

run_program(main)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A stage `toy` whose program runs as one plain process."""
    (tmp_path / "toy_program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run_toy(action="work", *listeners):
        context = RunContext(tmp_path / "ws", listener=StageListener(*listeners))
        return StageRunner(context).run(Job(SPEC, {"toy": ToyConfig(action=action)}, {}, 1))

    return run_toy


def test_a_stage_runs_once(toy, recorder):
    first = toy("work", recorder)
    made = (first / "result").stat().st_mtime_ns
    assert toy("work", recorder) == first
    assert (first / "result").stat().st_mtime_ns == made
    finished = ("FINISHED", {"loss": 0.25})
    progress = [("metrics", step) for step in (1, 2, 3)]
    assert recorder.heard == [("started", False), *progress, finished, ("started", True), finished]
    assert Manifest.read(first).metrics == {"loss": 0.25}


def test_a_failure_shows_the_program_s_reason(toy, recorder, tmp_path):
    with pytest.raises(StageError):
        toy("fail")
    with pytest.raises(StageError) as failure:
        toy("fail", recorder)
    message = str(failure.value)
    assert "stage toy failed after" in message
    assert "exit code 1" in message
    assert "RuntimeError: the cause" in message
    assert "toy_program" in message and "program.log" in message
    assert recorder.heard[-1] == ("FAILED", {})
    (metrics,) = (tmp_path / "ws" / "toy").glob("*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 3  # those of the second attempt
    with pytest.raises(StageError, match=r"rank0: rows\.jsonl:3: no chosen answer") as explained:
        toy("explain")
    assert "Traceback" not in str(explained.value)


def test_a_signal_ends_the_program_and_its_children(toy, recorder, tmp_path):
    mark = str(tmp_path / "child")

    def children():
        """Those of this test: other tests run beside it."""
        processes = psutil.process_iter(["cmdline"])
        return [process for process in processes if mark in (process.info["cmdline"] or [])]

    def interrupt():
        if children():  # else nothing would turn the signal into an exception
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with once(children, interrupt), pytest.raises(Interrupted, match="SIGTERM"):
            toy("sleep", recorder)
        assert recorder.heard[-1] == ("KILLED", {})
        wait_until(lambda: not children())
    finally:
        for child in children():
            child.kill()


def test_the_driver_imports_neither_torch_nor_mlflow():
    heavy = "('torch', 'mlflow', 'deepspeed', 'transformers')"
    code = (
        "import sys, rlhf_pipeline.stages.run, rlhf_pipeline.run.hooks; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    source = Path(run.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert result.stdout.strip() == "[]"
