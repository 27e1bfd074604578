"""A node as the driver sees it, and the node's agent, at the ends of a real connection."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from waiting import wait_until

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.launch.agent import _connect, obey_and_report
from rlhf_pipeline.stages.launch.link import Link
from rlhf_pipeline.stages.launch.node_program import NodeProgram
from rlhf_pipeline.stages.launch.ranks import Ranks
from rlhf_pipeline.stages.launch.remote_node import RemoteNode


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as found:
        yield found


@pytest.fixture
def ends(pool):
    """The node for the driver, and the link of its agent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = pool.submit(_connect, server.getsockname(), "secret", 30.0, 30.0)
        driver = Link(server.accept()[0], "secret", driver=True, timeout_s=30.0)
    agent = connecting.result()
    yield RemoteNode(driver, 1, range(1, 2), "other"), agent
    driver.close()
    agent.close()


def test_an_agent_gets_the_files_of_the_stage_only(ends, pool, tmp_path):
    node, agent = ends
    private = tmp_path / "private"
    private.write_text("key")
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.json").write_text("{}")

    def ask_for_another():
        agent.expect("prepare")
        agent.send("prepared", separate=True)
        agent.expect("copy")
        agent.send("wanted", files=[str(work / "job.json"), str(private)])
        pieces = [agent.receive_piece() for _ in range(2)]
        agent.send("received")
        return pieces

    asking = pool.submit(ask_for_another)
    run = SimpleNamespace(directory=work, inputs={}, resume_from=None)
    with pytest.raises(StageError, match=rf"node 1 \(other, rank 1\) asked for {private}, "):
        node.prepare(run)
    node.link.close()
    with pytest.raises(StageError, match="the connection was closed"):
        asking.result()


def test_the_ranks_of_a_lost_node_are_not_waited_for(ends, tmp_path):
    node, agent = ends
    ranks = Ranks(tmp_path, range(0), None, [node])
    beat = {"rank": 1, "pid": 7, "since": 1.0, "progressed": 1.0}
    agent.send(
        "report", heartbeats=[beat], statuses={1: "running"}, errors={}, code=None, kernel_kills=0
    )
    wait_until(lambda: ranks.read() == [1])
    agent.close()
    wait_until(lambda: node.lost)
    assert ranks.read() == []


def test_a_node_reports_its_own_ranks_only(ends):
    """The driver would signal the process of rank 0 that a node names."""
    node, agent = ends
    beats = [{"rank": rank, "pid": 1, "since": 1.0, "progressed": 1.0} for rank in (0, 1)]
    agent.send("report", heartbeats=beats, statuses={}, errors={}, code=None, kernel_kills=0)
    wait_until(lambda: node.update() or node.heartbeats)
    assert list(node.heartbeats) == [1]


def test_a_node_whose_gpus_cannot_be_counted_is_reported(ends, pool, tmp_path, monkeypatch):
    node, agent = ends
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    obeying = pool.submit(obey_and_report, agent)
    node.start(NodeProgram("program", str(tmp_path), ranks=(1, 1), node=1))
    wait_until(lambda: node.lost or obeying.done())
    with pytest.raises(StageError, match="CUDA_VISIBLE_DEVICES: found '0,0'"):
        obeying.result()
    wait_until(lambda: node.lost)
    assert "is lost: CUDA_VISIBLE_DEVICES: found '0,0'" in str(node.lost)


def test_a_goodbye_counts_although_the_driver_has_left(ends):
    node, agent = ends
    node.link.send("goodbye", code=0)
    node.link.close()
    wait_until(lambda: agent.lost)
    assert obey_and_report(agent) == 0
