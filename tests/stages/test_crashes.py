"""The scenarios of `crash_scenarios.py`, hundreds of forks of a process of their own.

A fork of the process of all tests, which has imported every library, takes three times as long.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_nothing_is_lost_at_any_fault_point(tmp_path):
    scenarios = Path(__file__).with_name("crash_scenarios.py")
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'scenarios'}"]
    command = [sys.executable, "-m", "pytest", str(scenarios), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0 and " skipped" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
