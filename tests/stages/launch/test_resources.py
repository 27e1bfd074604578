"""Ports, GPUs and processes of a launch."""

import socket

import pytest
from ports import reserved_port

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.stages.launch.resources import free_port, gpu_count, process_count


def test_a_port_in_use_is_reported():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"launch\.master_port: port {port} is in use"):
            free_port(port)


def test_a_configured_port_is_used_and_any_other_is_free():
    with reserved_port() as port:  # no other program takes it meanwhile
        assert free_port(port) == port
        assert free_port(None) not in (0, port)


def test_gpus_are_those_that_the_environment_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert gpu_count() == process_count(LaunchConfig(), gpu_count()) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert process_count(LaunchConfig(), gpu_count()) == 3


@pytest.mark.parametrize("visible", ["-1", ""])
def test_two_processes_run_without_a_gpu(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == 0
    assert process_count(LaunchConfig(), gpu_count()) == 2
    assert process_count(LaunchConfig(processes=3), gpu_count()) == 3
