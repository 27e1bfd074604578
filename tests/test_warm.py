"""The tests' own machinery: their template of programs, and the CPU on a machine with GPUs."""

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
import warm
from processes import completed
from waiting import wait_until

TESTS = Path(__file__).parent
EIGHT_GPUS = """
import torch, rlhf_pipeline.models  # which asks a GPU for its properties
torch.cuda.is_available = lambda: True
torch.cuda.device_count = torch._C._cuda_getDeviceCount = lambda: 8
import conftest, rank_fixtures, rlhf_pipeline.distributed.world as world
print(world.on_gpu(), world.get_accelerator().device_name())
"""


def test_tests_compute_on_the_cpu_of_a_machine_with_gpus(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    done = completed(sys.executable, "-c", EIGHT_GPUS, PYTHONPATH=f"{TESTS.parent / 'src'}:{TESTS}")
    assert done.stdout.split()[-2:] == ["False", "cpu"], done.stderr


@pytest.fixture
def template():
    if not warm.address:
        pytest.skip("only workers of pytest-xdist have a template")
    return warm.address


def test_the_template_survives_a_sender_that_was_killed_before_its_answer(template, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("print('done')")
    request = {"command": [sys.executable, str(program)], "environment": dict(os.environ),
               "folder": str(tmp_path), "blocked": [], "session": True}  # fmt: skip
    command = request["command"]
    assert warm.output_of(command, os.environ) == (0, "done\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.connect(template)
        sender.shutdown(socket.SHUT_RD)
        with Path(os.devnull).open() as file:
            socket.send_fds(sender, [json.dumps(request).encode()], [file.fileno()] * 3)
    assert warm.output_of(command, os.environ) == (0, "done\n")


def test_the_template_is_a_child_of_no_worker(template):
    """Tests end all children of their worker, as a scheduler does."""
    wait_until(Path(template).exists)
    (process,) = (
        each
        for each in psutil.process_iter(["cmdline", "ppid"])
        if (each.info["cmdline"] or [])[1:3] == [warm.__file__, template]
    )
    workers = psutil.Process(os.getppid()).children()
    assert process.info["ppid"] not in [worker.pid for worker in workers]
