"""The DAG of `kedro airflow create` has one task for each stage, and Airflow runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
AIRFLOW = PROJECT / ".venv-airflow" / "bin" / "airflow"
KEDRO = Path(sys.executable).with_name("kedro")
STAGES = "base_model split sft reward_model ppo evaluate register report".split()
NAME = "rlhf-pipeline-tiny-full"

needs_airflow = pytest.mark.skipif(not AIRFLOW.exists(), reason="needs Airflow: make airflow")


@pytest.fixture(scope="module")
def dags(tmp_path_factory):
    """The folder with the DAG of the pipeline `full`."""
    folder = tmp_path_factory.mktemp("dags")
    options = ["--pipelines=full", "--env=tiny", "--jinja-file=conf/airflow_dag.j2"]
    command = [str(KEDRO), "airflow", "create", *options, f"--target-dir={folder}"]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    return folder


@pytest.fixture
def airflow(dags, tmp_path):
    """Runs a command of Airflow in a home of its own; returns its output."""
    own = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "RLHF_PROJECT": str(PROJECT),
        "RLHF_KEDRO": str(KEDRO),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }

    def run(*arguments, **environment):
        done = subprocess.run(
            [str(AIRFLOW), *arguments],
            env=os.environ | own | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("db", "migrate")
    return run


@pytest.mark.slow
def test_every_stage_is_a_task(dags):
    (file,) = dags.glob("*.py")
    text = file.read_text()
    compile(text, file, "exec")
    assert [line.split(" = ")[0].strip() for line in text.splitlines() if ' = stage("' in line] == (
        STAGES
    )
    assert f'dag_id="{NAME}"' in text
    assert "schedule=None" in text
    edges = {tuple(line.strip().split(" >> ")) for line in text.splitlines() if " >> " in line}
    assert {("base_model", "split"), ("reward_model", "ppo"), ("register", "report")} <= edges
    assert all(STAGES.index(before) < STAGES.index(after) for before, after in edges)


@needs_airflow
@pytest.mark.slow
def test_airflow_parses_the_dag(airflow):
    airflow("dags", "reserialize")
    assert "No data found" in airflow("dags", "list-import-errors")
    assert set(airflow("tasks", "list", NAME).split()) == set(STAGES)


@needs_airflow
@pytest.mark.long
def test_tasks_make_what_one_run_makes(airflow, project, tmp_path):
    folder = tmp_path / "folder"  # the package runs in it as in the repository
    folder.mkdir()
    program = str(KEDRO.with_name("rlhf-pipeline"))
    airflow("dags", "test", NAME, RLHF_PROJECT=str(folder), RLHF_KEDRO=program)
    for stage in ("sft", "reward", "ppo"):
        (model,) = folder.glob(f"data/tiny/06_models/{stage}_model/*Z/*/model.safetensors")
        expected = project.newest(f"06_models/{stage}_model") / "model.safetensors"
        assert model.read_bytes() == expected.read_bytes(), stage
    assert list(folder.glob("data/tiny/08_reporting/evaluation.html/*Z/evaluation.html"))
