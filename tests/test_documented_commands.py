"""Every command of the documentation runs, or is listed with the reason why not.

`kedro run` is planned instead, which checks its pipeline and its parameters; the tests of
`tests/pipelines` train.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from documented_commands import NOT_RUN, SHELL, as_status, commands
from test_docs import PAGES, PROJECT

from rlhf_pipeline.cli import cli

EACH = sorted({command for page in PAGES for command in commands(page)})


def is_listed(command: str) -> bool:
    return command.startswith(tuple(NOT_RUN))


PLANNED = [each for each in EACH if as_status(each) is not None and not is_listed(each)]
PLANS = """
import json, sys
from pathlib import Path
from kedro.framework.cli.cli import KedroCLI

cli = KedroCLI(project_path=Path.cwd())
for arguments in json.load(sys.stdin):
    print("PLAN", arguments, flush=True)
    cli.main(["rlhf", "status", *arguments], standalone_mode=False)
"""
"""Plans many runs in one process: a process for each would take half a minute more."""


@pytest.mark.parametrize("command", [each for each in EACH if each.startswith("kedro rlhf ")])
def test_options_of_commands_exist(command):
    """click accepts the arguments."""
    name, *arguments = shlex.split(command)[2:]
    subcommand = cli.commands["rlhf"].commands[name]
    subcommand.make_context(name, arguments, resilient_parsing=False)


@pytest.mark.parametrize("command", [each for each in EACH if each.startswith("make")])
def test_targets_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (PROJECT / "Makefile").read_text(), re.M)


def test_documented_runs_are_planned(tmp_path):
    """Their pipelines and parameters exist and fit each other; nothing is launched."""
    planned = [planned_with(as_status(command), tmp_path) for command in PLANNED]
    done = subprocess.run(
        [sys.executable, "-c", PLANS],
        input=json.dumps(planned),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    plans = done.stdout.split("PLAN ")[1:]
    assert len(plans) == len(planned) > 10
    assert all(re.search(r"^(sft|ppo|source)", plan, re.M) for plan in plans)


def planned_with(options: list[str], root: Path) -> list[str]:
    """The options with the parameter `root`, so that no result of the project counts."""
    params = [each.removeprefix("--params=") for each in options if each.startswith("--params=")]
    params = [each for each in params if not each.startswith("root=")]
    others = [each for each in options if not each.startswith("--params=")]
    return [*others, f"--params={','.join([f'root={root}', *params])}"]


def test_other_commands_are_listed_with_a_reason():
    run = {"runs", "report", "compare", "lineage", "clean"}
    missing = [
        command
        for command in EACH
        if command not in PLANNED
        and not is_listed(command)
        and not (command.startswith("kedro rlhf") and command.split()[2] in run)
    ]
    assert missing == []
    assert [each for each in NOT_RUN if not any(c.startswith(each) for c in EACH)] == []


def test_shell_blocks_are_marked():
    """A block of commands is `sh`, so that these tests read it."""
    for page in PAGES:
        fence = None
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                fence = None if fence is not None else line.removeprefix("```")
            elif fence in ("", "text"):
                assert not re.match(r"(kedro|make|\.venv/bin/\w+) ", line), f"{page.name}: {line}"
    assert any(SHELL.search(page.read_text()) for page in PAGES)


def test_click_refuses_an_unknown_option():
    with pytest.raises(click.NoSuchOption):
        cli.commands["rlhf"].commands["runs"].make_context("runs", ["--versions"])
