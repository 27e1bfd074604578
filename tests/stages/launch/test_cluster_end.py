"""The end of a run comes soon, and leaves neither a server nor a file behind."""

import socket
import time

import pytest
from ports import reserved_port

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.stages.launch.cluster import Cluster


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
