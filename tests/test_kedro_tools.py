"""Kedro-Viz and Airflow read the project: the drawing with its metrics, and the DAG."""

import json
import os
import signal
import subprocess
import urllib.request
from contextlib import suppress
from importlib.util import find_spec

import pytest
from conftest import KEDRO, PROJECT
from kedro.io import Version
from ports import reserved_port
from processes import completed
from waiting import wait_until

from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.runtime.manifest import Manifest

AIRFLOW = PROJECT / ".venv-airflow" / "bin" / "airflow"
STAGES = "base_model split sft reward_model ppo evaluate register report".split()
LAYERS = {
    "base_model": "base model", "split": "data", "sft_model": "models", "reward_model": "models",
    "ppo_model": "models", "evaluation": "reporting", "registration": "reporting",
    "evaluation_page": "reporting",
}  # fmt: skip
NAME = "rlhf-pipeline-tiny-full"


@pytest.mark.long
@pytest.mark.skipif(find_spec("kedro_viz") is None, reason="needs Kedro-Viz: make viz")
def test_viz_shows_layers_and_stages_and_the_metrics_of_a_data_set_without_a_warning(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    metrics = {"win_rate/gold": 0.75, "kl/policy": 12.34567}
    Manifest("evaluate", "f", 1, {}, {}, {}, metrics, {}).write(folder)
    place = f"{tmp_path}/08_reporting/evaluation"
    ArtifactDataset(filepath=place, version=Version(None, "2026-01-01T00.00.00.000Z")).save(folder)
    with reserved_port() as port, (tmp_path / "viz.log").open("w") as log:
        options = ["--no-browser", f"--port={port}", "--env=tiny", f"--params=root={tmp_path}"]
        # As in `make viz`: Kedro-Viz uses a class that FastAPI has deprecated.
        quiet = {"PYTHONWARNINGS": "ignore:ORJSONResponse is deprecated"}
        settings = {"cwd": PROJECT, "env": os.environ | quiet}
        command, output = [KEDRO, "viz", "run", *options], {"stdout": log, "stderr": log}
        server = subprocess.Popen(command, start_new_session=True, **settings, **output)

        def get(path: str) -> dict:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{path}") as answer:
                return json.load(answer)

        def answers() -> bool:
            with suppress(OSError):
                get("version")
                return True
            return server.poll() is not None

        try:
            wait_until(answers)
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


@pytest.mark.slow
def test_the_dag_has_one_task_for_each_stage_and_airflow_parses_it(tmp_path):
    dags = tmp_path / "dags"
    options = ["--pipelines=full", "--env=tiny", "--jinja-file=conf/airflow_dag.j2"]
    made = completed(KEDRO, "airflow", "create", *options, f"--target-dir={dags}", folder=PROJECT)
    assert made.returncode == 0, made.stderr
    (file,) = dags.glob("*.py")
    text = file.read_text()
    compile(text, file, "exec")
    lines = [line.strip() for line in text.splitlines()]
    assert [line.split(" = ")[0] for line in lines if ' = stage("' in line] == STAGES
    assert f'dag_id="{NAME}"' in text and "schedule=None" in text
    edges = {tuple(line.split(" >> ")) for line in lines if " >> " in line}
    assert {("base_model", "split"), ("reward_model", "ppo"), ("register", "report")} <= edges
    assert all(STAGES.index(before) < STAGES.index(after) for before, after in edges)
    if not AIRFLOW.exists():
        pytest.skip("the DAG is right; that Airflow parses it needs Airflow: make airflow")
    own = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "RLHF_PROJECT": str(PROJECT), "RLHF_KEDRO": KEDRO,
    }  # fmt: skip

    def airflow(*arguments):
        done = completed(AIRFLOW, *arguments, **own)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    airflow("db", "migrate")
    airflow("dags", "reserialize")
    assert "No data found" in airflow("dags", "list-import-errors")
    assert set(airflow("tasks", "list", NAME).split()) == set(STAGES)
