"""The tutorials: their files and commands, in the order of the page, in a copy of the project."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import SHELL, as_status, commands
from ports import reserved_port
from processes import completed

from rlhf_pipeline.kedro_run.checks import check
from rlhf_pipeline.kedro_run.config_loader import LayeredConfigLoader
from rlhf_pipeline.settings import CONFIG_LOADER_ARGS

PROJECT = Path(__file__).parents[1]
TUTORIALS = PROJECT / "docs" / "tutorials"
FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def copy_of_the_project(root: Path) -> None:
    """The code and the configuration, without the reader's own."""
    for part in ("src", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "local")
        shutil.copytree(PROJECT / part, root / part, ignore=ignored)
    shutil.copy(PROJECT / "pyproject.toml", root)
    (root / "conf" / "local").mkdir(exist_ok=True)


def write(path: str, text: str, root: Path) -> None:
    """A file that a tutorial asks for."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def environment(root: Path) -> dict[str, str]:
    """The variables of a shell in the copy."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": places, "PYTHONPATH": str(root / "src"), "HOME": str(root), "COLUMNS": "200"}
    return os.environ | own


def run(command: str, root: Path) -> str:
    """Run a command in the copy; return its output."""
    done = completed("bash", "-c", command, folder=root, **environment(root))
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_commands_of_the_first_tutorial_can_be_planned(tmp_path):
    """Its parameters fit each other and its files exist; nothing trains."""
    copy_of_the_project(tmp_path)
    page = TUTORIALS / "own-data.md"
    for path, text in FILE.findall(page.read_text()):
        write(path, text, tmp_path)
    planned = 0
    for command in commands(page):
        if command.startswith(("mkdir", "python make_")):
            run(command, tmp_path)
        elif as_status(command) is not None:
            options = re.sub(r"^kedro (run|rlhf status)| --to-nodes=\S+", "", command)
            assert "split" in run(f"kedro rlhf status {options}", tmp_path)
            planned += 1
    assert planned > 0


def checked_parameters(page: str) -> dict[str, Any]:
    """The blocks of a configuration with the parameters that a page shows first."""
    changes = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    conf = str(PROJECT / "conf")
    loader = LayeredConfigLoader(conf, env="base", runtime_params=changes, **CONFIG_LOADER_ARGS)
    return check(loader["parameters"], gpus=1)


def test_the_parameters_for_an_instruct_model_pass_all_checks(tmp_path):
    page = (TUTORIALS / "instruct-model.md").read_text()
    for name in ("config.json", "tokenizer.json"):  # the download of the page
        (tmp_path / name).write_text('{"model_type": "llama"}')
    blocks = checked_parameters(re.sub(r"data/smollm2/[\w.-]+(?=})", str(tmp_path), page))
    assert blocks["sft"] is None and blocks["reward_model"] is None
    assert blocks["grpo"].actor.lora is not None


def test_the_generated_tasks_of_the_tutorial_pass_all_checks():
    pytest.importorskip("reasoning_gym", reason="the extra `gym` is not installed")
    page = (TUTORIALS / "grpo.md").read_text().partition("## A real task")[2]
    blocks = checked_parameters(page)
    assert blocks["grpo"].rewards[1].weight == 0.2 and blocks["sft"] is None
    assert blocks["split"].sources[0].tasks["spell_backward"]["max_word_len"] == 4


def vote_on_every_pair(command: str, root: Path) -> None:
    """Start the server of the page, choose answer A of each pair, and end it by Ctrl-C."""
    with reserved_port() as port:
        address, started = f"http://127.0.0.1:{port}", [*command.split(), f"--port={port}"]
        with subprocess.Popen(
            started, cwd=root, env=environment(root), stdout=subprocess.PIPE, text=True
        ) as server:
            assert address in server.stdout.readline()
            pair = answer(f"{address}/state?annotator=Ann")["pair"]
            while pair is not None:
                given = {"annotator": "Ann", "pair": pair["id"], "choice": "a"}
                pair = answer(f"{address}/vote", given)["pair"]
            server.send_signal(signal.SIGINT)


def answer(address: str, body: dict[str, str] | None = None) -> dict:
    """The answer to a GET request, or to a POST request with a body."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.load(response)


SHOWN = {
    "own-data": ("reward_model: finished", "page: file://"),
    "own-reward": ("evaluate: finished", "brief", "page: file://"),
    "grpo": ("grpo: finished", "registry"),
    "tools": ("grpo: finished", "registry", "verified"),
    "../labelling": ("reward_model: finished", "registry"),
    "compare": ("verified", "second against first", "brief judge", "evaluate_models"),
    "reward-model": ("reward_model: finished", "length_correlation", "I do not know."),
}
"""What the commands of a tutorial print, among other things."""


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_a_tutorial_runs(name, tmp_path):
    """Its files are written and its commands run in the order of the page."""
    copy_of_the_project(tmp_path)
    page = (TUTORIALS / f"{name}.md").read_text()
    steps = [*FILE.finditer(page), *SHELL.finditer(page)]
    printed = ""
    for step in sorted(steps, key=re.Match.start):
        if step.re is FILE:
            write(*step.groups(), tmp_path)
            continue
        for command in re.sub(r"  +#.*|\\\n", "", step[1]).splitlines():
            if command.startswith("kedro rlhf label"):
                vote_on_every_pair(command, tmp_path)
            else:
                printed += run(command, tmp_path)
    assert [text for text in SHOWN[name] if text not in printed] == []
