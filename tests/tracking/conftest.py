"""A real MLflow database for each test; creating its tables takes seconds, so they are created once and copied."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from rlhf_pipeline.tracking.store import connect


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    project = tmp_path_factory.mktemp("database")
    connect(f"sqlite:///{project}/mlflow.db", project)
    return project / "mlflow.db"


@pytest.fixture
def uri(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(uri, tmp_path):
    return connect(uri, tmp_path)


@pytest.fixture
def served(uri, tmp_path):
    """A client of a real tracking server, which keeps artifacts in a folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--artifacts-destination", str(tmp_path / "served"), "--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "server.log")
        yield connect(f"http://127.0.0.1:{port}", tmp_path)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(url, server, log, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"{url} does not answer:\n{log.read_text()}")
