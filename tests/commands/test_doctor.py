"""`kedro rlhf doctor`: its checks on machines that other programs pretend, and the command."""

import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project
from processes import descendants

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands import status as machine
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB

Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_almost_full(monkeypatch, tmp_path):
    for free, state in ((20 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 2, "failure")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        found = machine.disk(tmp_path)
        assert found.state == state
        assert found.found.startswith(f"{size_text(free)} free for")


@pytest.mark.parametrize(
    ("command", "seconds", "state", "found"),
    [
        ("env NODE={node} {command}", 60, "ok", "^2 ranks start on 2 machines$"),
        ("sh -c 'echo cannot resolve worker-1; exit 3' {command}", 60, "failure",
         r"found exit code 3[\s\S]*cannot resolve worker-1"),
        ("sh -c 'exec sleep 600' {command}", 0.5, "failure",
         r"found ranks that do not start within 0\.5 s"),
    ],
)  # fmt: skip
def test_ranks_start_on_each_node_in_time_or_end_in_a_failure_with_the_output(
    monkeypatch, tmp_path, command, seconds, state, found
):
    """Two nodes, whose ranks run on this machine."""
    source = str(Path(machine.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(machine, "START_S", seconds)
    launch = LaunchConfig(
        command=command, mode="command", address="127.0.0.1", nodes=2, processes=1
    )
    finding = machine.nodes(launch, tmp_path)
    assert finding.state == state and re.search(found, finding.found)
    commands = [program.info["cmdline"] for program in descendants(os.getpid())]
    assert ["sleep", "600"] not in commands


@pytest.mark.parametrize(
    ("error", "found", "fix"),
    [
        (ConfigError("place: found 1, expected 2. Fix: set 2 at s3://me:secret@host/file"),
         "place: found 1, expected 2.", "set 2 at s3://...@host/file"),
        (ZeroDivisionError("first line\nsecond line"),
         "ZeroDivisionError: first line", "repair what the message names"),
    ],
)  # fmt: skip
def test_an_error_is_a_failure_with_its_fix(error, found, fix):
    def fails():
        raise error

    check = machine.examine(fails)
    assert (check.state, check.found, check.fix) == ("failure", found, fix)


def doctor(params):
    """The exit code of the command, and what it prints, without its line breaks."""
    arguments = ["rlhf", "doctor", "--env=tiny", f"--params={params}"]
    done = CliRunner().invoke(cli, arguments, obj=bootstrap_project(Path(__file__).parents[2]))
    return done.exit_code, done.stdout


def test_a_sound_machine_has_no_failure(tmp_path):
    code, printed = doctor(f"root={tmp_path}")
    lines = printed.splitlines()
    assert code == 0 and lines[0].split() == ["check", "state", "found"], printed
    assert [line.split()[0] for line in lines[1:]] == ["disk", "nodes", "run"]


def test_what_a_run_would_refuse_is_a_failure_with_the_same_fix(tmp_path):
    """A model of 500 billion weights, whose training needs more memory than any machine of ours."""
    sizes = {"hidden_size": 20480, "intermediate_size": 81920, "num_hidden_layers": 100}
    params = ",".join(f"base_model.architecture.{name}={size}" for name, size in sizes.items())
    code, printed = doctor(f"root={tmp_path},{params}")
    printed = " ".join(printed.split())
    assert code == 1 and "run failure invalid parameters:" in printed
    assert "use more or larger GPUs, or a smaller model" in printed
