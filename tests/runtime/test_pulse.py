"""Ranks follow the driver's pulse: real processes that end when it ends, changes or stops."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from waiting import wait_until

from rlhf_pipeline.runtime.heartbeat import LAUNCH, process_identity
from rlhf_pipeline.runtime.pulse import EVERY_S, PULSE, Pulse, read_beat

RANK = """
import subprocess, sys, time
from pathlib import Path
import psutil
from rlhf_pipeline.runtime.pulse import follow

psutil._psplatform.boot_time = lambda: 1.0  # as after a step of the clock
child = subprocess.Popen(["sleep", "600"])
follow(Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def rank(tmp_path):
    """Starts a process that follows the pulse; returns it with its child."""
    started = []

    def start(launch, timeout_s=None):
        pulse = {PULSE: f"{launch} {timeout_s}"} if timeout_s else {LAUNCH: f"{launch} {tmp_path}"}
        command = [sys.executable, "-c", RANK, str(tmp_path)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=os.environ | pulse, **output)
        child = psutil.Process(int(process.stdout.readline()))
        started.append((process, child))
        return process, child

    yield start
    for process, child in started:
        process.kill()
        if child.is_running():
            child.kill()


def test_the_end_of_the_block_ends_ranks_and_their_children(tmp_path, rank):
    pulse = Pulse(tmp_path, 60, {"program": "p"})
    with pulse.beating():
        process, child = rank(pulse.launch, 60)
        assert read_beat(tmp_path)["plan"] == {"program": "p"}
        number = read_beat(tmp_path)["number"]
        wait_until(lambda: read_beat(tmp_path)["number"] > number + 2)
        assert process.poll() is None
    assert read_beat(tmp_path)["ended"] is True
    assert process.wait(60) == 1
    wait_until(lambda: not child.is_running())


@pytest.mark.parametrize("is_silent", [False, True])
def test_another_launch_or_silence_ends_a_rank(tmp_path, rank, is_silent):
    """After silence, the file stays as the lost driver has left it."""
    pulse, start = Pulse(tmp_path, 3, {}), time.monotonic()
    with pulse.beating():
        left = (tmp_path / "heartbeats" / "driver.json").read_text()
        if not is_silent:
            assert rank("an-earlier-one", 60)[0].wait(60) == 1
            return
    (tmp_path / "heartbeats" / "driver.json").write_text(left)
    assert rank(pulse.launch, 3)[0].wait(60) == 1
    assert time.monotonic() - start > 3 - EVERY_S


def test_a_rank_of_one_machine_ends_with_its_driver(rank):
    """Whoever kills the driver may kill its guard, too."""
    driver = subprocess.Popen(["sleep", "600"])
    process, child = rank(process_identity(driver.pid))
    time.sleep(2 * EVERY_S)
    assert process.poll() is None and child.is_running()
    driver.kill()  # a zombie until it is waited for
    assert process.wait(60) == 1
    wait_until(lambda: not child.is_running())
    driver.wait()


def test_a_file_that_cannot_be_read_now_is_no_end(tmp_path):
    assert read_beat(tmp_path) == {}
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "driver.json").write_text(json.dumps({"launch": "x"}))
    assert read_beat(tmp_path) == {"launch": "x"}
