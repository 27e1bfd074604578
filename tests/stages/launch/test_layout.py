"""The nodes of a run, from its configuration."""

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.stages.launch.resources import node_layout, rank_count

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
        ("gpu-1 8\n", "found 'gpu-1 8' in line 1 of .*, expected a host and its ranks"),
        ("a slots=1\na slots=1\n", "found a twice in"),
        ("a slots=1\n", "found 1 hosts in .*, expected at least 2"),
    ],
)
def test_a_hostfile_with_a_fault_is_refused(hostfile, text, message):
    with pytest.raises(ConfigError, match=rf"launch.hostfile: {message}"):
        node_layout(hostfile(text), gpus=1)


def test_a_missing_hostfile_is_refused(tmp_path):
    config = LaunchConfig(mode="hostfile", hostfile=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"launch\.hostfile: found no file"):
        node_layout(config, gpus=1)


def test_a_stray_hostfile_and_stray_variables_are_never_read(monkeypatch):
    for name, value in {"NODE_RANK": "1", "NNODES": "4", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    assert node_layout(LaunchConfig(), gpus=2).ranks == (2,)


def test_all_ranks_count(hostfile):
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
