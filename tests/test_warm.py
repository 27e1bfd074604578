"""The tests' own template of programs."""

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
import warm
from waiting import wait_until


def test_the_template_survives_a_sender_that_was_killed_before_its_answer(tmp_path):
    if not warm.address:
        pytest.skip("only workers of pytest-xdist have a template")
    program = tmp_path / "program.py"
    program.write_text("print('done')")
    request = {"command": [sys.executable, str(program)], "environment": dict(os.environ),
               "folder": str(tmp_path), "blocked": [], "session": True}  # fmt: skip
    command = request["command"]
    assert warm.output_of(command, os.environ) == (0, "done\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.connect(warm.address)
        sender.shutdown(socket.SHUT_RD)
        with Path(os.devnull).open() as file:
            socket.send_fds(sender, [json.dumps(request).encode()], [file.fileno()] * 3)
    assert warm.output_of(command, os.environ) == (0, "done\n")


def test_the_template_is_a_child_of_no_worker():
    """Tests end all children of their worker, as a scheduler does."""
    if not warm.address:
        pytest.skip("only workers of pytest-xdist have a template")
    wait_until(Path(warm.address).exists)
    (template,) = (
        process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if (process.info["cmdline"] or [])[1:3] == [warm.__file__, warm.address]
    )
    workers = psutil.Process(os.getppid()).children()
    assert template.info["ppid"] not in [worker.pid for worker in workers]
