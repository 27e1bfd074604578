"""Joining the other ranks, and leaving them."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, torch
from rlhf_pipeline.distributed.world import join
atexit.register(lambda: print("connected at the end:", torch.distributed.is_initialized()))  # runs after what join registers
join(0, timeout_s=60)
print("connected:", torch.distributed.is_initialized())
"""


def test_a_program_needs_no_compiler_and_leaves_before_the_interpreter_ends(environment, tmp_path):
    """Threads of an open process group can abort a process after its work is done: exit code -6 instead of 0.

    DeepSpeed's shared-memory operation would be compiled, and leave 69 MB a rank in /dev/shm for good.
    """
    no_compiler = {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    variables = os.environ | environment() | no_compiler
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not any(tmp_path.iterdir())
    assert not list(
        Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{variables['MASTER_PORT']}_*")
    )
    assert [line for line in ended.stdout.splitlines() if line.startswith("connected")] == [
        "connected: True",
        "connected at the end: False",
    ]


LISTENING = """
import psutil
from rlhf_pipeline.distributed.world import join
world = join(0, timeout_s=60)
world.barrier()
sockets = psutil.Process().net_connections("inet")
print("listens at:", sorted({socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}))
"""


def test_ranks_of_one_machine_can_be_reached_from_there_alone(environment):
    """torch's own store would listen at "::", every interface."""
    ended = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "listens at: ['127.0.0.1']" in ended.stdout, ended.stdout + ended.stderr
