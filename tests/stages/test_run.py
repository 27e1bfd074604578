"""Running stages: progress, failures that explain themselves, less memory, signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import once, wait_until

from rlhf_pipeline.errors import Interrupted, StageError
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.stages import run


def test_a_stage_runs_once(drill, recorder):
    drill.order("measure")
    first = drill.run(listener=recorder)
    made = (first / "result").stat().st_mtime_ns
    assert drill.run(listener=recorder) == first
    assert (first / "result").stat().st_mtime_ns == made
    finished = ("FINISHED", {"loss": 0.25})
    progress = [("metrics", step) for step in (1, 2, 3)]
    assert recorder.heard == [("started", False), *progress, finished, ("started", True), finished]
    assert Manifest.read(first).metrics == {"loss": 0.25}


def test_a_failure_shows_the_reason_of_the_program_and_is_not_retried(drill, recorder):
    for order in ("measure", "crash"):
        drill.order(order)
    for launches in (1, 2):
        with pytest.raises(StageError) as failure:
            drill.run(listener=recorder)
        assert drill.launches == launches
    message = str(failure.value)
    for part in ("stage drill failed after", "exit code 1", "RuntimeError: the cause"):
        assert part in message
    assert "drill_program" in message and "program.log" in message
    assert recorder.heard[-1] == ("FAILED", {})
    (metrics,) = drill.root.glob("workspace/drill/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 3  # those of the second attempt
    drill.order("fail")
    with pytest.raises(StageError, match="rank0: ordered to fail") as explained:
        drill.run()
    assert "Traceback" not in str(explained.value)


def test_a_signal_ends_the_program_and_its_children(drill, recorder):
    drill.order("child")
    mark = str(drill.root / "child")

    def children():
        """Those of this test: other tests run beside it."""
        processes = psutil.process_iter(["cmdline"])
        return [process for process in processes if mark in (process.info["cmdline"] or [])]

    def interrupt():
        if children():  # else nothing would turn the signal into an exception
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with once(children, interrupt), pytest.raises(Interrupted, match="SIGTERM"):
            drill.run(listener=recorder)
        assert recorder.heard[-1] == ("KILLED", {})
        wait_until(lambda: not children())
    finally:
        for child in children():
            child.kill()


def test_the_driver_imports_neither_torch_nor_mlflow():
    driver = "rlhf_pipeline.stages.run, rlhf_pipeline.kedro_run.hooks"
    code = f"import sys, {driver}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(run.__file__).parents[2])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert {"torch", "mlflow", "deepspeed", "transformers"}.isdisjoint(result.stdout.split())
