"""Nodes, ports, GPUs and processes of a launch."""

import base64
import json
import socket

import pytest
from ports import reserved_port

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.stages.launch.node_program import NodeProgram
from rlhf_pipeline.stages.launch.resources import (
    free_port,
    gpu_count,
    node_layout,
    rank_count,
    visible_gpus,
)

HOSTS = """
# two machines
gpu-1 slots=8
gpu-2   slots=4   # an older one
"""


@pytest.fixture
def hostfile(tmp_path):
    """Writes a hostfile; returns the block `launch` that names it."""

    def write(text, **fields):
        file = tmp_path / "hosts"
        if text is not None:
            file.write_text(text)
        return LaunchConfig(mode="hostfile", hostfile=str(file), **fields)

    return write


def test_a_hostfile_gives_hosts_and_ranks(hostfile):
    layout = node_layout(hostfile(HOSTS), gpus=8)
    assert layout.ranks == (8, 4) and layout.hosts == ("gpu-1", "gpu-2")
    assert layout.address == "gpu-1"
    assert node_layout(hostfile(HOSTS, processes=2, address="10.0.0.1"), 8).ranks == (2, 2)
    assert node_layout(hostfile(HOSTS, address="10.0.0.1"), 8).address == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu-1 8\n", "found 'gpu-1 8' in .*, expected each host once with its ranks"),
        ("a slots=1\na slots=1\n", "found 'a slots=1' in .*, expected each host once"),
        ("a slots=1\n", "found 1 hosts in .*, expected at least 2"),
        (None, "found no file"),
    ],
)
def test_a_hostfile_with_a_fault_is_refused(hostfile, text, message):
    with pytest.raises(ConfigError, match=rf"launch.hostfile: {message}"):
        node_layout(hostfile(text), gpus=1)


def test_all_ranks_count_and_stray_variables_do_not(hostfile, monkeypatch):
    for name, value in {"NODE_RANK": "1", "NNODES": "4", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    assert node_layout(LaunchConfig(), gpus=2).ranks == (2,)
    assert rank_count(hostfile(HOSTS), gpus=8) == 12
    assert rank_count(LaunchConfig(), gpus=0) == 2
    assert rank_count(LaunchConfig(processes=3), gpus=0) == 3
    command = LaunchConfig(mode="command", command="srun {command}", nodes=4)
    assert rank_count(command, gpus=8) == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "hostfile"}, "hostfile: found null"),
        ({"mode": "command", "nodes": 2}, "command: found null"),
        ({"mode": "command", "command": "srun {command}"}, "nodes: found null"),
        ({"mode": "command", "command": "srun", "nodes": 2}, "expected it to contain {command}"),
    ],
)
def test_modes_need_their_parameters(fields, message):
    with pytest.raises(ValueError, match=message):
        LaunchConfig(**fields)


def test_a_configured_port_is_used_unless_it_is_taken_and_any_other_is_free():
    with reserved_port() as port:  # no other program takes it meanwhile
        assert free_port(port) == port
        assert free_port(None) not in (0, port)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"launch\.master_port: port {port} is in use"):
            free_port(port)


@pytest.fixture
def machine(monkeypatch, nvidia_smi):
    """Makes a machine of that many GPUs and sets environment variables of the launch."""
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)

    def make(gpus, **variables):
        nvidia_smi(gpus)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,0"}, ["2"]),  # as in CUDA, -1 ends the list
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-5a5d6"}, ["GPU-8932f937", "GPU-5a5d6"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937/1/0"}, ["MIG-GPU-8932f937/1/0"]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cpu"}, []),
    ],
)
def test_gpus_are_those_that_the_environment_shows(machine, variables, expected):
    machine(4, **variables)
    assert visible_gpus() == expected
    assert rank_count(LaunchConfig(), gpu_count()) == (len(expected) or 2)


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0,0", "CUDA_VISIBLE_DEVICES: found '0,0', expected different numbers or UUIDs"),
        ("first", "CUDA_VISIBLE_DEVICES: found 'first', expected different numbers or UUIDs"),
        ("MIG-1a,MIG-2b", "found 2 devices with MIG instances, expected a single instance"),
    ],
)
def test_a_list_that_cuda_would_cut_is_refused(machine, visible, message):
    machine(4, CUDA_VISIBLE_DEVICES=visible)
    with pytest.raises(ConfigError, match=message):
        visible_gpus()


def test_a_broken_driver_is_reported(machine):
    """Training must not silently move to the CPU."""
    machine(None)
    with pytest.raises(ConfigError, match=r"nvidia-smi: .* \(NVIDIA-SMI has failed\)\. Fix: "):
        gpu_count()


def test_each_rank_gets_a_gpu_and_without_one_all_are_hidden(machine):
    def devices():
        command = NodeProgram("program", "", ranks=2).command
        (world,) = (part for part in command if part.startswith("--world_info="))
        return json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))["node0"]

    machine(0)
    assert gpu_count() == 0
    machine(4)
    assert devices() == ["0", "1"]
    machine(4, CUDA_VISIBLE_DEVICES="")
    assert devices() == ["-1", "-1"]
