"""The tests' own template of programs."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import warm


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
