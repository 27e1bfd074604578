"""Kedro-Viz shows the layers in order, the stages, and the metrics of what they made."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from kedro.io import Version
from ports import reserved_port

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.runtime.manifest import Manifest

PROJECT = Path(__file__).parents[1]
STAGES = ["base_model", "split", "sft", "reward_model", "ppo", "evaluate", "register", "report"]
LAYERS = {
    "base_model": "base model", "split": "data", "sft_model": "models", "reward_model": "models",
    "ppo_model": "models", "evaluation": "reporting", "registration": "reporting",
    "evaluation_page": "reporting",
}  # fmt: skip
WITHOUT_ITS_OWN_WARNING = {"PYTHONWARNINGS": "ignore:ORJSONResponse is deprecated"}
"""As in `make viz`: Kedro-Viz uses a class that FastAPI has deprecated."""


@pytest.mark.slow
def test_it_shows_layers_and_stages_and_the_metrics_of_a_data_set_without_a_warning(tmp_path):
    if find_spec("kedro_viz") is None:
        pytest.skip("needs Kedro-Viz: make viz")
    folder = tmp_path / "export"
    folder.mkdir()
    metrics = {"win_rate/gold": 0.75, "kl/policy": 12.34567}
    Manifest("evaluate", "f", 1, {}, {}, {}, metrics, {}).write(folder)
    place = f"{tmp_path}/08_reporting/evaluation"
    ArtifactDataset(filepath=place, version=Version(None, "2026-01-01T00.00.00.000Z")).save(folder)
    with reserved_port() as port, (tmp_path / "viz.log").open("w") as log:
        options = ["--no-browser", f"--port={port}", "--env=tiny", f"--params=root={tmp_path}"]
        server = subprocess.Popen(
            [sys.executable, "-m", "kedro", "viz", "run", *options],
            cwd=PROJECT,
            env=os.environ | WITHOUT_ITS_OWN_WARNING,
            start_new_session=True,
            stdout=log,
            stderr=log,
        )

        def get(path: str) -> dict:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}") as answer:
                return json.load(answer)

        try:
            deadline = time.monotonic() + 300
            while server.poll() is None and time.monotonic() < deadline:
                with suppress(urllib.error.URLError):
                    get("version")
                    break
                time.sleep(0.5)
            graph = get("pipelines/full")
            nodes = {node["name"]: node for node in graph["nodes"]}
            shown = get(f"nodes/{nodes['evaluation']['id']}")
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert graph["layers"] == ["base model", "data", "models", "reporting"]
    assert {name: node["layer"] for name, node in nodes.items() if node.get("layer")} == LAYERS
    assert [node["name"] for node in graph["nodes"] if node["type"] == "task"] == STAGES
    assert shown["preview_type"] == "TablePreview"
    assert shown["preview"]["columns"] == ["metric", "value"]
    assert shown["preview"]["data"] == [["kl/policy", "12.35"], ["win_rate/gold", "0.75"]]
    assert "warn" not in (tmp_path / "viz.log").read_text().lower()
