"""Joining the other ranks, and leaving them."""

import os
import subprocess
import sys

PROGRAM = """
import atexit, torch
from rlhf_pipeline.training.engine import join
atexit.register(lambda: print("connected at the end:", torch.distributed.is_initialized()))  # runs after what join registers
join(0, timeout_s=60)
print("connected:", torch.distributed.is_initialized())
"""


def test_a_program_leaves_before_the_interpreter_ends(environment):
    """Threads of an open process group can abort a process after its work is done: exit code -6 instead of 0."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("connected")] == [
        "connected: True",
        "connected at the end: False",
    ]
