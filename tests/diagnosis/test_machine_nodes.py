"""The check of the other machines, with a real agent on this one."""

import os
from pathlib import Path

import psutil
import pytest
from ports import reserved_port

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.diagnosis import machine as module
from rlhf_pipeline.diagnosis.finding import run_checks


@pytest.fixture
def launch(monkeypatch):
    """Makes the block `launch` of two nodes; the agent runs on this machine."""
    source = str(Path(module.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))

    def make(command):
        with reserved_port() as port:
            place = {"address": "127.0.0.1", "port": port, "start_timeout_s": 60.0}
            return LaunchConfig(mode="command", nodes=2, processes=1, command=command, **place)

    return make


def test_a_machine_alone_has_no_nodes_to_check(setup):
    assert module.nodes(setup()).found == "this machine trains alone"


def test_the_speed_of_each_node_is_measured(setup, launch, monkeypatch):
    found = module.nodes(setup(launch=launch("{command}")))
    assert found.state == "ok"
    assert "node 1 (" in found.found and " ms, " in found.found and "Gbit/s" in found.found
    monkeypatch.setattr(module, "SLOW_GBIT", 1e9)
    slow = module.nodes(setup(launch=launch("{command}")))
    assert slow.state == "warning" and "launch.address" in slow.fix


def test_a_node_that_cannot_be_started_is_a_failure(setup, launch):
    (found,) = run_checks([module.nodes], setup(launch=launch("sh -c 'exit 3' {command}")))
    assert (found.check, found.state) == ("nodes", "failure")
    assert "found exit code 3 of the command" in found.found


def test_agents_that_do_not_come_are_reported_in_time_and_ended(setup, launch, monkeypatch):
    """With the output of the command that should have started them."""
    monkeypatch.setattr(module, "START_S", 0.5)
    hanging = "sh -c 'echo cannot resolve worker-1; exec sleep 600' {command}"
    (found,) = run_checks([module.nodes], setup(launch=launch(hanging)))
    assert "found 0 of 1 other nodes connected after 0.5 s; " in found.found
    assert "cannot resolve worker-1" in found.found
    assert found.fix.startswith("check that they start")
    commands = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert ["sleep", "600"] not in commands
