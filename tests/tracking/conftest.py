"""A real MLflow database for each test."""

import shutil
import sys

import pytest

from rlhf_pipeline.tracking.store import connect


@pytest.fixture
def uri(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return connect(uri, tmp_path)


@pytest.fixture
def serve(uri, start_server, tmp_path):
    """Starts a real tracking server that stores artifacts as options say; returns a client."""

    def serve(*options):
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *options]
        environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
        return connect(start_server(command, "/health", environment), tmp_path)

    return serve
