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
def served(uri, start_server, tmp_path):
    """A client of a real tracking server with a separate folder of artifacts."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
    return connect(start_server(command, "/health", environment), tmp_path)
