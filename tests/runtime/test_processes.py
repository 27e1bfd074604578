"""Identities of processes, and the end of what a launch has left running."""

import os
import signal
import subprocess
import sys

import pytest

from rlhf_pipeline.runtime.processes import LAUNCH, kill_strays, process_identity


@pytest.fixture
def start(tmp_path):
    """Starts a sleeping process of a launch of this test, in its own session."""
    started = []

    def start(launch):
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; print(flush=True); time.sleep(900)"],
            stdout=subprocess.PIPE,
            env=os.environ | {LAUNCH: f"{tmp_path} {launch}"},
            start_new_session=True,
        )
        process.stdout.readline()  # the environment can be read
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_identity_of_a_process_is_constant(start):
    process = start("one")
    identity = process_identity(process.pid)
    assert identity.startswith(f"{process.pid}@")
    assert process_identity(process.pid) == identity != process_identity(os.getpid())


def test_a_process_that_ended_has_no_identity(start):
    process = start("one")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but not reaped
    assert process_identity(process.pid) is None
    process.wait()
    assert process_identity(process.pid) is None


def test_only_processes_of_the_launch_are_killed(start, tmp_path):
    stray, group, other = start("one"), start("one"), start("two")
    kill_strays(f"{tmp_path} one", except_group=os.getpgid(group.pid))
    assert stray.wait(timeout=600) == -signal.SIGKILL
    assert group.poll() is None and other.poll() is None
