"""Kedro-Viz shows the layers in order, the stages, and the metrics of what they made."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
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
    "base_model": "base model",
    "split": "data",
    "sft_model": "models",
    "reward_model": "models",
    "ppo_model": "models",
    "evaluation": "reporting",
    "registration": "reporting",
    "evaluation_page": "reporting",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The data folder, with one published evaluation."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "export"
    folder.mkdir()
    metrics = {"win_rate/gold": 0.75, "kl/policy": 12.34567}
    Manifest("evaluate", "f", 1, {}, {}, {}, metrics, {}).write(folder)
    place = f"{root}/08_reporting/evaluation"
    ArtifactDataset(filepath=place, version=Version(None, "2026-01-01T00.00.00.000Z")).save(folder)
    return root


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The file with what `kedro viz` prints."""
    return tmp_path_factory.mktemp("viz") / "log"


@pytest.fixture(scope="module")
def api(root, log):
    """What the server of `kedro viz` answers to a path."""
    if find_spec("kedro_viz") is None:
        pytest.skip("needs Kedro-Viz: make viz")
    with reserved_port() as port, log.open("w") as output:
        options = ["--no-browser", f"--port={port}", "--env=tiny", f"--params=root={root}"]
        server = subprocess.Popen(
            [sys.executable, "-m", "kedro", "viz", "run", *options],
            cwd=PROJECT,
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

        def get(path: str) -> dict:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}") as answer:
                return json.load(answer)

        try:
            deadline = time.monotonic() + 300
            while server.poll() is None and time.monotonic() < deadline:
                try:
                    get("version")
                    break
                except urllib.error.URLError:
                    time.sleep(0.5)
            yield get
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_it_starts_without_a_warning(api, log):
    assert [line for line in log.read_text().splitlines() if "warning" in line.lower()] == []


def test_the_layers_are_in_the_order_of_the_pipeline(api):
    graph = api("pipelines/full")
    assert graph["layers"] == ["base model", "data", "models", "reporting"]
    layers = {node["name"]: node["layer"] for node in graph["nodes"] if node.get("layer")}
    assert layers == LAYERS


def test_every_stage_is_a_node(api):
    nodes = api("pipelines/full")["nodes"]
    assert [node["name"] for node in nodes if node["type"] == "task"] == STAGES


def test_a_data_set_shows_the_metrics_of_its_stage(api):
    nodes = api("pipelines/full")["nodes"]
    (node,) = [node["id"] for node in nodes if node["name"] == "evaluation"]
    shown = api(f"nodes/{node}")
    assert shown["preview_type"] == "TablePreview"
    assert shown["preview"]["columns"] == ["metric", "value"]
    assert shown["preview"]["data"] == [["kl/policy", "12.35"], ["win_rate/gold", "0.75"]]
