"""The tutorials: their files and commands, in the order of the page, in a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import as_status, commands

PROJECT = Path(__file__).parents[1]
TUTORIALS = PROJECT / "docs" / "tutorials"
FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVES = ("kedro rlhf label",)
"""Until Ctrl-C."""

tutorials = pytest.mark.parametrize("name", ["own-data", "own-reward", "grpo", "human-feedback"])


def copy_with_files(name: str, root: Path) -> None:
    """A copy of the project with the files that a tutorial asks for."""
    for part in ("src", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "local")
        shutil.copytree(PROJECT / part, root / part, ignore=ignored)
    shutil.copy(PROJECT / "pyproject.toml", root)
    for path, text in FILE.findall((TUTORIALS / f"{name}.md").read_text()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "conf" / "local").mkdir(exist_ok=True)


def run(command: str, root: Path) -> str:
    """Run a command in the copy; return its output."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": places, "PYTHONPATH": str(root / "src"), "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@tutorials
def test_the_commands_of_a_tutorial_can_be_planned(name, tmp_path):
    """Its parameters fit each other and its files exist; nothing trains."""
    copy_with_files(name, tmp_path)
    planned = 0
    for command in commands(TUTORIALS / f"{name}.md"):
        if command.startswith(("mkdir", "python")):
            run(command, tmp_path)
        elif as_status(command) is not None:
            if "votes.jsonl" in (TUTORIALS / f"{name}.md").read_text():
                votes = tmp_path / "data/tiny/01_raw/votes.jsonl"
                votes.parent.mkdir(parents=True, exist_ok=True)
                votes.touch()
            options = re.sub(r"^kedro (run|rlhf status)| --to-nodes=\S+", "", command)
            assert "ppo" in run(f"kedro rlhf status {options}", tmp_path)
            planned += 1
    assert planned > 0
