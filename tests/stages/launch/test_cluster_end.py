"""The end of a run comes soon, and leaves neither a server nor a file behind."""

import socket
import tempfile
import time

import pytest
from ports import reserved_port
from waiting import wait_until

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.launch import cluster as module
from rlhf_pipeline.stages.launch.agent import description
from rlhf_pipeline.stages.launch.cluster import Cluster
from rlhf_pipeline.stages.launch.link import TOKEN, Link


@pytest.fixture
def launch():
    """Makes the block `launch` of two nodes."""

    def make(**fields):
        with reserved_port() as port:
            return LaunchConfig(address="127.0.0.1", processes=1, port=port, **fields)

    return make


def test_a_second_run_of_the_same_process_can_listen(launch):
    """A thread that waits for connections would keep a closed server alive."""
    config = launch(mode="command", nodes=2, command="sleep 60 {command}")
    first = Cluster(config)
    with socket.create_connection(("127.0.0.1", config.port)) as stranger:
        stranger.recv(1)
        time.sleep(0.2)  # the thread waits for the next connection
        first.close(0)
    Cluster(config).close(0)


def test_the_list_of_hosts_is_removed(launch, monkeypatch, tmp_path):
    """DeepSpeed's launcher fails here: it can reach no host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\nno-such-host.invalid slots=1\n")
    cluster = Cluster(launch(mode="hostfile", hostfile=str(hostfile)))
    cluster._start()
    (hosts,) = tmp_path.glob("hosts-*")
    assert hosts.read_text() == "no-such-host.invalid slots=1\n"
    cluster.close(0)
    assert not hosts.exists()


def test_the_commands_that_start_nodes_share_the_time_to_end(launch, monkeypatch):
    """One of four nodes has come; the commands of the others hang."""
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setattr(module, "GOODBYE_S", 1.0)
    config = launch(mode="command", nodes=5, command="sh -c 'exec sleep 600' {command} {node}")
    cluster = Cluster(config)
    cluster._start()
    connection = socket.create_connection(("127.0.0.1", config.port))
    agent = Link(connection, "secret", driver=False, timeout_s=30.0)
    agent.send("hello", number=1, **description())
    wait_until(lambda: cluster._nodes)
    start = time.monotonic()
    cluster.close(0)
    assert time.monotonic() - start < 3
    agent.close()
