"""The commands `kedro rlhf ...`, on a run of the fast stages."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from browser import chromium
from ports import reserved_port
from processes import descendants, imported, kedro
from selenium.webdriver.common.by import By
from waiting import wait_until

from rlhf_pipeline.tracking.store import VERDICT_TAG, connect, experiment_id

PROJECT = Path(__file__).parents[1]
SOURCE = str(PROJECT / "src")


@pytest.mark.parametrize("command", ["run --env=tiny", "rlhf status --params 'ppo.lr=1 2'"])
def test_a_command_outside_of_a_project_says_what_to_write(tmp_path, command):
    done = kedro(*shlex.split(command), folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"kedro {command}: found no project in {tmp_path} or above it, expected one. Fix: change "
        f"to the folder of your project, or write `rlhf-pipeline {command}`, which works in any "
        "folder: it keeps its results there, and has a configuration\n"
    )


def test_in_an_empty_workspace_every_stage_would_run_and_nothing_is_created(tmp_path):
    modules, done = imported(
        *("kedro", "rlhf", "status", "--env=tiny", f"--params=root={tmp_path / 'data'}"),
        cwd=PROJECT,
        env=os.environ | {"COLUMNS": "120"},
    )
    *table, shares = done.stdout.splitlines()
    assert shares.startswith("Training conversations")
    assert shares.endswith("can serve each phase: sft 20%, reward_model 40%, ppo 40%")
    rows = [re.split(r"  +", line.strip()) for line in table[1:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("source synthetic", "run", "never run here"),
        ("base_model", "run", "downstream of source synthetic; never run here"),
        ("split", "run", "downstream of base_model; never run here"),
        ("sft", "run", "downstream of split, base_model; never run here"),
        ("reward_model", "run", "downstream of split, sft; never run here"),
        ("ppo", "run", "downstream of split, sft, reward_model; never run here"),
        ("evaluate", "run", "downstream of split, sft, ppo, reward_model; never run here"),
        ("register", "run", "every time; may evaluate the champion first"),
        ("report", "run", "every time"),
    ]
    assert not (tmp_path / "data").exists()
    assert "rlhf_pipeline.stages.cache.planning" in modules
    assert modules & {"torch", "transformers", "deepspeed", "mlflow", "pandas"} == set()


def test_a_subfolder_has_the_project_and_the_paths_of_its_root(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "conf", project / "conf")
    shutil.copy(PROJECT / "pyproject.toml", project)
    for folder in ("src", "docs", "conf/local"):
        (project / folder).mkdir(exist_ok=True)
    (project / "rewards.py").write_text("def f(prompts, responses): return map(len, responses)\n")
    (project / "conf" / "local" / "parameters.yml").write_text("ppo: {rewards: ['rewards.py:f']}\n")
    ended = kedro("rlhf", "status", "--env=tiny", folder=project / "docs", PYTHONPATH=SOURCE)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    assert "source synthetic  run " in printed
    assert f"in {project}, where relative paths start\n" in printed
    assert list((project / "docs").iterdir()) == []


def test_ui_serves_the_page_whose_list_of_runs_shows_the_verdicts(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri, tmp_path)
    run = client.create_run(experiment_id(client), tags={VERDICT_TAG: "PPO is better."})
    for name, value in {"eval/win_rate": 0.61, "eval/score": 1.5}.items():
        client.log_metric(run.info.run_id, name, value)
    with reserved_port() as port:
        pass
    command = [sys.executable, "-m", "kedro", "rlhf", "ui", f"--port={port}"]
    # PATH is without the environment's programs.
    settings = {"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin", "MLFLOW_WORKERS": "1"}
    settings = {"cwd": PROJECT, "env": os.environ | settings | {"MLFLOW_TRACKING_URI": uri}}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen(command, start_new_session=True, **settings, **output)
    try:
        link = server.stdout.readline().removeprefix("runs: ").strip()
        address = f"http://127.0.0.1:{port}"
        assert re.fullmatch(rf"{address}/#/experiments/\d+/runs\?workflowType=\S+", link)

        pages = []

        def answers():
            with suppress(OSError):
                pages.append(urllib.request.urlopen(address, timeout=2).read().decode())
            return pages

        wait_until(answers)
        assert "MLflow" in pages[0]
        commands = [str(program.info["cmdline"]) for program in descendants(server.pid)]
        assert commands and not [line for line in commands if "mlflow.db" in line]
        second = subprocess.run(command, capture_output=True, text=True, **settings)
        assert f"Error: --port: another program answers at {port}" in second.stderr
        assert "Fix: open the link above, or use `kedro rlhf ui --port=" in second.stderr
        with chromium("--window-size=2200,900") as page:
            page.get(link)
            wait_until(lambda: "PPO is better" in page.find_element(By.TAG_NAME, "body").text)
            shown = page.find_element(By.TAG_NAME, "body").text
        for text in ("rlhf.verdict", "eval/win_rate", "0.61", "eval/score", "1.5"):
            assert text in shown, shown
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
