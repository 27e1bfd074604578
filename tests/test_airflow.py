"""The DAG of `kedro airflow create`."""

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


@pytest.mark.slow
def test_the_dag_has_one_task_for_each_stage_and_airflow_parses_it(tmp_path):
    dags = tmp_path / "dags"
    options = ["--pipelines=full", "--env=tiny", "--jinja-file=conf/airflow_dag.j2"]
    command = [str(KEDRO), "airflow", "create", *options, f"--target-dir={dags}"]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    (file,) = dags.glob("*.py")
    text = file.read_text()
    compile(text, file, "exec")
    lines = [line.strip() for line in text.splitlines()]
    assert [line.split(" = ")[0] for line in lines if ' = stage("' in line] == STAGES
    assert f'dag_id="{NAME}"' in text
    assert "schedule=None" in text
    edges = {tuple(line.split(" >> ")) for line in lines if " >> " in line}
    assert {("base_model", "split"), ("reward_model", "ppo"), ("register", "report")} <= edges
    assert all(STAGES.index(before) < STAGES.index(after) for before, after in edges)
    if not AIRFLOW.exists():
        pytest.skip("the DAG is right; that Airflow parses it needs Airflow: make airflow")
    own = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "RLHF_PROJECT": str(PROJECT),
        "RLHF_KEDRO": str(KEDRO),
    }

    def airflow(*arguments):
        done = subprocess.run(
            [str(AIRFLOW), *arguments], env=os.environ | own, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    airflow("db", "migrate")
    airflow("dags", "reserialize")
    assert "No data found" in airflow("dags", "list-import-errors")
    assert set(airflow("tasks", "list", NAME).split()) == set(STAGES)
