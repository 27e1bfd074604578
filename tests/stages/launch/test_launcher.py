"""Signals to the driver, and the end of a program's process group."""

import os
import signal
import subprocess
import threading

import pytest

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.stages.launch.launcher import _end_group, _signals_raise


def test_a_second_signal_kills_the_program_at_once():
    ready = ["sh", "-c", "trap '' TERM; echo; sleep 300 & wait; wait"]
    process = subprocess.Popen(ready, stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with _signals_raise(), pytest.raises(Interrupted, match="SIGINT"):
        again.start()
        _end_group(process, 200.0)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_closed_terminal_interrupts_the_driver():
    with pytest.raises(Interrupted, match="SIGHUP"), _signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts its command
    try:
        with _signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
