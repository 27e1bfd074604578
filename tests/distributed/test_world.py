"""Numbers of all ranks, and how the ranks of one machine meet."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.runtime.program import RENDEZVOUS
from rlhf_pipeline.stages.launch import node_program
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import node_layout

SOURCE = Path(rlhf_pipeline.__file__).parent
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
RANK = """
import json, os
import numpy as np
import psutil
from rlhf_pipeline.distributed.world import join

world = join(0, timeout_s=600)
value = [[1.5, float("nan"), "\u00e9" * world.rank], [[0, 1]]] if world.rank else np.int64(7)
found = world.gather(value)
ports = [socket.laddr for socket in psutil.Process().net_connections() if socket.status == "LISTEN"]
print(json.dumps([found, ports]))
"""


def test_numbers_that_all_ranks_have_are_read_but_not_summed(monkeypatch):
    """Two ranks with the same values: sums are doubled, equal numbers are not."""
    monkeypatch.setattr(World, "sum", lambda world, tensor: 2 * tensor)
    world = World(0, 2, torch.device("cpu"))
    sums = {"tokens": torch.tensor(3), "loss": torch.tensor(1.5, requires_grad=True)}
    found = world.sums(sums, equal={"norm": torch.tensor(0.25)})
    assert found == {"tokens": 6.0, "loss": 3.0, "norm": 0.25}
    assert world.sums(sums) == {"tokens": 6.0, "loss": 3.0}


def test_two_ranks_meet_in_a_file_and_exchange_json(tmp_path):
    """Nothing listens at MASTER_PORT, so nobody else can join there."""
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DS_ACCELERATOR": "cpu",
        RENDEZVOUS: str(tmp_path / "store"), "PYTHONPATH": str(SOURCE.parent),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for rank in ranks:
        found, ports = json.loads(rank.communicate()[0].splitlines()[-1])
        assert str(found) == "[7, [[1.5, nan, 'é'], [[0, 1]]]]"
        assert {address for address, _ in ports} == {"127.0.0.1"}
        assert 1 not in [port for _, port in ports]


def test_each_launch_meets_in_a_new_private_folder(tmp_path, monkeypatch):
    folders = []

    def started(command, environment, **_):
        folders.append(Path(environment.get(RENDEZVOUS, "/several/nodes")).parent)
        if RENDEZVOUS in environment:
            assert folders[-1].stat().st_mode & 0o777 == 0o700
            assert not [*folders[-1].iterdir()]
        raise InterruptedError

    monkeypatch.setattr(node_program, "start", started)
    one = NodeProgram("program", str(tmp_path), ranks=2)
    config = LaunchConfig(mode="command", nodes=2, command="srun {command}", address="127.0.0.1")
    for program in (one, one, on_several_machines(one, config, node_layout(config, 0))):
        with pytest.raises(InterruptedError), program.running():
            pass
    assert folders[0] != folders[1] and not any(folder.exists() for folder in folders)
    assert folders[2] == Path("/several")


def test_no_rank_unpickles_what_another_process_sends():
    for file in SOURCE.rglob("*.py"):
        used = {
            node.attr for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "attr")
        }
        assert not used & OBJECT_COLLECTIVES, file
