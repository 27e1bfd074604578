"""`kedro rlhf serve`: the command becomes the server."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from ports import reserved_port

PROJECT = Path(__file__).parents[2]


def command(policy, port, root):
    arguments = ["-m", "kedro", "rlhf", "serve", str(policy), f"--port={port}", "--env=tiny"]
    return [sys.executable, *arguments, f"--params=root={root}"]


@pytest.mark.slow
def test_it_answers_until_ctrl_c(published, tmp_path):
    with reserved_port() as port:
        server = subprocess.Popen(
            command(published, port, tmp_path), cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        try:
            address = f"http://127.0.0.1:{port}/v1"
            said = server.stdout.readline()
            assert said == f"{published} answers at {address}; Ctrl-C ends it\n"
            with urllib.request.urlopen(f"{address}/models", timeout=600) as response:
                assert [model["id"] for model in json.load(response)["data"]] == [str(published)]
            server.send_signal(signal.SIGINT)
            assert server.wait() == 0
        finally:
            server.kill()
            server.communicate()


@pytest.mark.slow
def test_a_port_in_use_is_refused_before_the_policy_is_loaded(published, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = subprocess.run(
            command(published, port, tmp_path), cwd=PROJECT, capture_output=True, text=True,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
    assert found.returncode != 0
    assert f"--port: another program answers at {port}" in found.stderr
    assert f"`kedro rlhf serve --port={port + 1}`" in found.stderr
