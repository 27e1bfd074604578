"""Every command of the documentation runs, or is listed with the reason why not.

`kedro run` is planned instead, which checks its pipeline and its parameters; the tests of
`tests/pipelines` train. Commands that read results run on those of the environment `tiny`.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from documented_commands import NOT_RUN, READ_RESULTS, SHELL, as_status, commands
from mlflow import MlflowClient
from processes import completed
from readme import PYTHON
from test_docs import PAGES, PROJECT

from rlhf_pipeline.cli import cli

STARTER = PROJECT / "starter" / "{{ cookiecutter.repo_name }}" / "README.md"
EACH = sorted({command for page in [*PAGES, STARTER] for command in commands(page)})


def is_listed(command: str) -> bool:
    return command.startswith(tuple(NOT_RUN))


PLANNED = [each for each in EACH if as_status(each) is not None and not is_listed(each)]
RUN = [each for each in EACH if each.startswith(READ_RESULTS) and not is_listed(each)]
COMMANDS = """
import json, sys
from pathlib import Path
from kedro.framework.cli.cli import KedroCLI

cli = KedroCLI(project_path=Path.cwd())
for arguments in json.loads(sys.argv[1]):
    print("COMMAND", arguments, flush=True)
    cli.main(["rlhf", *arguments], standalone_mode=False)
"""
"""Runs many commands in one process: a process for each would take half a minute more."""


def run_all(arguments: list[list[str]], **variables: str) -> list[str]:
    """What each of some `kedro rlhf` commands prints; the test fails if one of them fails."""
    program = [sys.executable, "-c", COMMANDS, json.dumps(arguments)]
    done = completed(*program, folder=PROJECT, COLUMNS="200", **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = done.stdout.split("COMMAND ")[1:]
    assert len(printed) == len(arguments)
    return printed


def test_options_of_commands_and_targets_exist():
    """click accepts the arguments."""
    makefile = (PROJECT / "Makefile").read_text()
    for command in EACH:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, re.M), command
        elif command.startswith("kedro rlhf "):
            name, *arguments = shlex.split(command)[2:]
            subcommand = cli.commands["rlhf"].get_command(None, name)
            subcommand.make_context(name, arguments, resilient_parsing=False)


def planned_with(options: list[str], root: Path) -> list[str]:
    """The options with the parameter `root`, so that no result of the project counts."""
    params = [each.removeprefix("--params=") for each in options if each.startswith("--params=")]
    params = [each for each in params if not each.startswith("root=")]
    others = [each for each in options if not each.startswith("--params=")]
    return [*others, f"--params={','.join([f'root={root}', *params])}"]


def test_documented_runs_are_planned(tmp_path):
    """Their pipelines and parameters exist and fit each other; nothing is launched."""
    plans = run_all([["status", *planned_with(as_status(each), tmp_path)] for each in PLANNED])
    assert len(plans) > 10
    assert all(re.search(r"^(sft|ppo|source)", plan, re.M) for plan in plans)


SHOWN = {
    "clean": "emove",
    "compare": "gold judge prefers",
    "export": "verified; SHA256SUMS has every digest",
    "lineage": "every byte is as it was recorded",
    "report": "page: file://",
    "runs": "win rate against the baseline",
    "verify": "Every byte is as it was exported",
}
"""What a command prints of the results."""


@pytest.fixture
def results(project, tmp_path):
    """A copy of the results of `tiny`, whose policy is the champion, and its tracking store."""
    root = tmp_path / "results"
    shutil.copytree(project.root, root, symlinks=True)
    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(uri)
    model = client.get_registered_model("rlhf-policy-tiny")
    client.set_registered_model_alias(model.name, "champion", model.aliases["candidate"])
    return root, uri


@pytest.mark.slow
def test_documented_commands_run_on_results(results, tmp_path):
    """A folder of the reader is one of the test; `clean --yes` comes last."""
    root, uri = results
    places = {"~": str(tmp_path), "data/tiny": str(root)}
    given = [f"--params=root={json.dumps(str(root))}"]
    commands = []
    for command in sorted(RUN, key=lambda each: ("--yes" in each, each)):
        words = [word for word in shlex.split(command)[2:] if word != "--env=tiny"]
        for written, used in places.items():
            words = [re.sub(rf"^{re.escape(written)}(?=/|$)", used, word) for word in words]
        commands.append(words if words[0] == "verify" else [*words, "--env=tiny", *given])
    printed = run_all(commands, MLFLOW_TRACKING_URI=uri, BROWSER="true")
    assert len(printed) > 12
    for words, text in zip(commands, printed, strict=True):
        assert SHOWN[words[0]] in text, words
    assert (tmp_path / "models" / "mine" / "SHA256SUMS").is_file()


@pytest.mark.long
def test_the_python_of_the_readme_runs_on_results(results, monkeypatch):
    """PPO and what follows it train again; `tiny` and the folder of the test are the difference."""
    root, uri = results
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (block,) = PYTHON
    own = f'env="tiny", params={{"root": {str(root)!r}'
    for printed, here in (("params={", f"{own}, "), ('"champion"', f'"champion", {own}}}')):
        assert printed in block
        block = block.replace(printed, here)
    names: dict = {}
    exec(block, names)
    assert names["result"].evaluation["candidate"] == "ppo"
    assert not names["model"].training


def test_other_commands_are_listed_with_a_reason():
    assert [each for each in EACH if each not in PLANNED + RUN and not is_listed(each)] == []
    assert [each for each in NOT_RUN if not any(c.startswith(each) for c in EACH)] == []


def test_the_reasons_name_tests_that_exist():
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"tests/[\w/.]+", reason)}
    assert [path for path in sorted(named) if not (PROJECT / path).exists()] == []
    unnamed = [each for each, reason in NOT_RUN.items() if "tests/" not in reason]
    assert all(NOT_RUN[each].startswith(("needs ", "a target")) for each in unnamed), unnamed


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
