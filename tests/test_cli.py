"""The commands `kedro rlhf ...`, on a run of the fast stages."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from browser import chromium
from ports import reserved_port
from processes import descendants
from selenium.webdriver.common.by import By
from waiting import wait_until

from rlhf_pipeline.tracking.store import VERDICT_TAG, connect, experiment_id

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def kedro(tmp_path_factory):
    """Runs a Kedro command in the environment `tiny` with a temporary root; returns the output."""
    root = tmp_path_factory.mktemp("root")
    settings = {
        "PYTHONPATH": str(PROJECT / "src"),
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{root}/mlflow.db",
    }

    def kedro(*arguments, params="", fails=False, python=()):
        result = subprocess.run(
            [
                sys.executable,
                *python,
                "-m",
                "kedro",
                *arguments,
                "--env=tiny",
                f"--params=root={root / 'data'}{params}",
            ],
            cwd=PROJECT,
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
        assert (result.returncode != 0) == fails, result.stdout + result.stderr
        return result.stdout + result.stderr

    kedro.workspace = root / "data" / "07_workspace"
    return kedro


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with the entry points of pyproject.toml, as an installation has."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "rlhf_pipeline-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: rlhf-pipeline\nVersion: 1\n")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("command", ["run --env=tiny", "rlhf status --params 'ppo.lr=1 2'"])
def test_a_command_outside_of_a_project_says_what_to_write(installed, tmp_path, command):
    done = subprocess.run(
        [sys.executable, "-m", "kedro", *shlex.split(command)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{installed}:{PROJECT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"kedro {command}: found no project in {tmp_path} or above it, expected one. Fix: change "
        f"to the folder of your project, or write `rlhf-pipeline {command}`, which works in any "
        "folder: it keeps its results there, and has a configuration\n"
    )


def rows(printed):
    """The cells of each line of the table: stage, state, recipe, details."""
    return [re.split(r"  +", line.strip()) for line in printed.splitlines()[1:]]


def test_in_an_empty_workspace_every_stage_would_run_and_nothing_is_created(kedro):
    printed = kedro("rlhf", "status", python=("-X", "importtime"))
    table = [line for line in printed.splitlines() if not line.startswith("import time:")]
    (shares,) = [line for line in table if line.startswith("Training conversations")]
    assert shares.endswith("can serve each phase: sft 20%, reward_model 40%, ppo 40%")
    table.remove(shares)
    assert [(row[0], row[1], row[-1]) for row in rows("\n".join(table))] == [
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
    assert not kedro.workspace.exists()
    imported = {
        line.rpartition("|")[2].strip()
        for line in printed.splitlines()
        if line.startswith("import time:")
    }
    assert "rlhf_pipeline.stages.cache.planning" in imported
    assert imported & {"torch", "transformers", "deepspeed", "mlflow"} == set()


def test_a_pipeline_without_published_inputs_would_fail(kedro):
    printed = kedro("rlhf", "status", "--pipeline=ppo")
    assert "fail" in printed
    assert "no version of split, sft_model, reward_model is published" in printed


def test_a_subfolder_has_the_project_and_the_paths_of_its_root(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "conf", project / "conf")
    shutil.copy(PROJECT / "pyproject.toml", project)
    for folder in ("src", "docs"):
        (project / folder).mkdir()
    (project / "rewards.py").write_text("def f(prompts, responses): return map(len, responses)\n")
    (project / "conf" / "local").mkdir(exist_ok=True)
    (project / "conf" / "local" / "parameters.yml").write_text("ppo: {rewards: ['rewards.py:f']}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "kedro", "rlhf", "status", "--env=tiny"],
        cwd=project / "docs",
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src")},
        capture_output=True,
        text=True,
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    assert "source synthetic  run " in printed
    assert f"in {project}, where relative paths start\n" in printed
    slow = printed.count("rewards.py:f: tried out")
    assert (
        printed.count("INFO") <= 1 + slow
    )  # Kedro says where its logging is configured, and no more
    assert list((project / "docs").iterdir()) == []


@pytest.mark.long
def test_status_force_and_clean_on_stages_that_have_run(kedro):
    assert "base_model: finished in" in kedro("run", "--nodes=base_model")
    (version,) = (kedro.workspace.parent / "02_base_model" / "base_model").glob("[0-9]*")
    source, base_model, split, *_ = rows(kedro("rlhf", "status"))
    assert (source[1], base_model[1]) == ("finished", "finished")
    assert base_model[-1].endswith(f"; run {version.name}")
    assert (split[1], split[-1]) == ("run", "never run here")
    assert rows(kedro("rlhf", "status", params=",seed=7"))[1][1:] == [
        "may run",
        "downstream of source synthetic",
    ]
    changed = rows(kedro("rlhf", "status", params=",base_model.vocab_size=400"))
    assert changed[1][::3] == ["base_model", "base_model.vocab_size 512 -> 400"]
    assert rows(kedro("rlhf", "status", params=",force=source"))[0][-1] == "forced"

    (old,) = (kedro.workspace / "source").iterdir()
    printed = kedro("run", "--nodes=base_model", params=",force=source")
    assert f"running as {old.name[:8]} in {old}.2" in printed
    assert re.search(r"base_model: reused \w{8}, finished earlier", printed)  # same bytes
    preview = kedro("rlhf", "clean")
    assert f"07_workspace/source/{old.name}  replaced by a later attempt" in preview
    assert "Nothing was removed." in preview
    assert old.is_dir()
    assert "freed" in kedro("rlhf", "clean", "--yes")
    assert not old.exists()
    assert "Nothing to remove." in kedro("rlhf", "clean", "--yes")
    assert [row[1] for row in rows(kedro("rlhf", "status"))[:2]] == ["finished", "finished"]


@pytest.mark.slow
def test_a_pipe_gets_rows_in_one_line():
    """Of 80 characters, `runs` would cut the interval of a win rate."""
    script = "from rlhf_pipeline.commands.command import console; console().print('win rate ' * 20)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert ended.stdout.count(b"\n") == 1


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
    settings = os.environ | {
        "PYTHONPATH": str(PROJECT / "src"),
        "PATH": "/usr/bin:/bin",  # without the environment's programs
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_WORKERS": "1",
    }
    server = subprocess.Popen(
        command,
        cwd=PROJECT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
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
        second = subprocess.run(command, cwd=PROJECT, env=settings, capture_output=True, text=True)
        assert f"Error: --port: another program answers at {port}" in second.stderr
        assert "Fix: open the link above, or use `kedro rlhf ui --port=" in second.stderr
        with chromium("--window-size=2200,900") as page:
            page.get(link)
            wait_until(lambda: "PPO is better" in page.find_element(By.TAG_NAME, "body").text)
            shown = page.find_element(By.TAG_NAME, "body").text
        for text in ("rlhf.verdict", "eval/win_rate", "0.61", "eval/score", "1.5"):
            assert text in shown, shown
        started = [str(program.info["cmdline"]) for program in descendants(server.pid)]
        assert not [line for line in started if "mlflow.server.jobs" in line]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
