"""Joining the other ranks and leaving them."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, torch
from rlhf_pipeline.distributed.world import join
# runs after what join registers
atexit.register(lambda: print("connected at the end:", torch.distributed.is_initialized()))
join(0, timeout_s=600)
print("connected:", torch.distributed.is_initialized())
"""


def test_a_program_needs_no_compiler_and_closes_its_connections_before_it_exits(
    rank_environment, tmp_path
):
    """Threads of an open process group can abort a process after its work: exit code -6, not 0.

    DeepSpeed's shared-memory operation would need a compiler and leave 69 MB per rank in /dev/shm.
    """
    no_compiler = {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    variables = os.environ | rank_environment | no_compiler
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
world = join(0, timeout_s=600)
world.barrier()
sockets = psutil.Process().net_connections("inet")
print("listens at:", sorted({socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}))
"""


def test_ranks_of_one_machine_listen_on_the_loopback_interface_only(rank_environment):
    """The store of torch would listen at "::", every interface."""
    ended = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env=os.environ | rank_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "listens at: ['127.0.0.1']" in ended.stdout, ended.stdout + ended.stderr
