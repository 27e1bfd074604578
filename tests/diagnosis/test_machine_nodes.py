"""The check of the other machines, with ranks on this one."""

import os
from pathlib import Path

import psutil
import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.diagnosis import machine as module
from rlhf_pipeline.diagnosis.finding import run_checks


@pytest.fixture
def launch(monkeypatch):
    """Makes the block `launch` of two nodes; their ranks run on this machine."""
    source = str(Path(module.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))

    def make(command):
        place = {"address": "127.0.0.1", "nodes": 2, "processes": 1}
        return LaunchConfig(mode="command", command=command, **place)

    return make


def test_a_machine_alone_has_no_nodes_to_check(setup):
    assert module.nodes(setup()).found == "this machine trains alone"


def test_ranks_start_on_each_node(setup, launch):
    found = module.nodes(setup(launch=launch("env NODE={node} {command}")))
    assert (found.state, found.found) == ("ok", "2 ranks start on 2 machines")


def test_a_node_that_cannot_be_started_is_a_failure_with_the_output(setup, launch):
    failing = launch("sh -c 'echo cannot resolve worker-1; exit 3' {command}")
    (found,) = run_checks([module.nodes], setup(launch=failing))
    assert (found.check, found.state) == ("nodes", "failure")
    assert "found exit code 3" in found.found and "cannot resolve worker-1" in found.found


def test_ranks_that_do_not_start_are_reported_in_time_and_ended(setup, launch, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.5)
    hanging = launch("sh -c 'exec sleep 600' {command}")
    (found,) = run_checks([module.nodes], setup(launch=hanging))
    assert "found ranks that do not start within 0.5 s" in found.found
    commands = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert ["sleep", "600"] not in commands
