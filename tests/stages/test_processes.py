"""Identities of processes, and the end of the processes of a launch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import HANGS_S

from rlhf_pipeline.runtime.heartbeat import LAUNCH, process_identity
from rlhf_pipeline.stages import processes
from rlhf_pipeline.stages.processes import kill_launch, may_run, this_process


@pytest.fixture
def start(tmp_path):
    """Starts a sleeping process of a launch of this test, in its own session."""
    started = []

    def start(launch):
        sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(900)"]
        environment = os.environ | {LAUNCH: f"{tmp_path} {launch}"}
        process = subprocess.Popen(
            sleep, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        process.stdout.readline()  # the environment can be read
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_identity_of_a_process_is_constant_until_it_ends(start):
    process = start("one")
    identity = process_identity(process.pid)
    assert identity.startswith(f"{process.pid}@")
    assert process_identity(process.pid) == identity != process_identity(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but not reaped
    assert process_identity(process.pid) is None
    process.wait()
    assert process_identity(process.pid) is None


def test_a_step_of_the_clock_changes_no_identity(monkeypatch):
    before = this_process()
    # The system computes the time of its start anew from the clock.
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: time.time() + 3600)
    assert this_process() == before
    assert may_run(before, time.time())


def test_a_process_of_another_container_or_machine_may_run_for_a_month(start):
    process = start("one")
    here, identity = this_process().rpartition(" ")[0], process_identity(process.pid)
    host, namespace = here.split("/")
    now, month = time.time(), 30 * 24 * 3600
    foreign = [f"{host}/{int(namespace) + 1} {identity}", f"other/{namespace} {identity}"]
    assert all(may_run(each, now - month + 60) for each in foreign)
    assert not any(may_run(each, now - month - 60) for each in foreign)
    assert may_run(f"{here} {identity}", 0.0)
    process.kill()
    process.wait()
    assert not may_run(f"{here} {identity}", now)
    assert may_run(foreign[0], now)


def test_only_processes_of_the_launch_are_killed(start, tmp_path):
    first, second, other = start("one"), start("one"), start("two")
    kill_launch(f"{tmp_path} one")
    assert first.wait(timeout=HANGS_S) == second.wait(timeout=HANGS_S) == -signal.SIGKILL
    assert other.poll() is None


DRIVER = """
import os, subprocess, sys
from rlhf_pipeline.runtime.heartbeat import LAUNCH, process_identity
from rlhf_pipeline.stages import processes
from rlhf_pipeline.stages.processes import guarded
launch = sys.argv[1]
with guarded(launch, os.environ["PYTHONPATH"], sys.argv[2]):
    subprocess.Popen(["sleep", "900"], env=os.environ | {LAUNCH: launch}, start_new_session=True)
    print(flush=True)
    sys.stdin.read()
"""


def test_the_processes_of_a_killed_driver_are_killed_and_its_folder_is_removed(start, tmp_path):
    rank, other = start("one"), start("two")
    source, folder = str(Path(processes.__file__).parents[2]), tmp_path / "rlhf-1"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, f"{tmp_path} one", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": source},
    )  # fmt: skip
    driver.stdout.readline()
    assert rank.poll() is None
    driver.kill()
    assert rank.wait(timeout=HANGS_S) == -signal.SIGKILL
    driver.communicate()  # the guard and the other process have closed its pipe
    assert not folder.exists()
    assert other.poll() is None
