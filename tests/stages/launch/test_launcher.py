"""Signals to the driver, and the end of a program's process group."""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.stages.launch.launcher import _end_group, _signals_raise

IGNORES_TERM = "trap '' TERM; sleep 900 & trap 'echo asked' TERM; echo ready; wait; wait"
"""Says that it is ready, and that it got the signal; its child ignores the signal."""


def test_a_second_signal_kills_the_program_at_once():
    process = subprocess.Popen(
        ["sh", "-c", IGNORES_TERM], stdout=subprocess.PIPE, start_new_session=True, text=True
    )

    def interrupt_again():
        if process.stdout.readline() == "asked\n":  # else the program has been killed
            os.kill(os.getpid(), signal.SIGINT)

    again = threading.Thread(target=interrupt_again)
    try:
        assert process.stdout.readline() == "ready\n"
        start = time.monotonic()
        with _signals_raise(), pytest.raises(Interrupted, match="SIGINT"):
            again.start()
            _end_group(process, 200.0)
        assert time.monotonic() - start < 200
        assert process.returncode == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        again.join()


def test_a_closed_terminal_interrupts_the_driver():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest itself may run under nohup
    try:
        with pytest.raises(Interrupted, match="SIGHUP"), _signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts its command
    try:
        with _signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
