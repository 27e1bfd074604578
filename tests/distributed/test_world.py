"""Ranks that meet, exchange numbers, take their device and leave."""

import ast
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.distributed import world as module
from rlhf_pipeline.distributed.engine import loaded
from rlhf_pipeline.distributed.products import uses_onednn
from rlhf_pipeline.distributed.world import World, join, on_gpu, take_device
from rlhf_pipeline.errors import StageError
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


def test_the_most_of_two_ranks_is_the_larger_number_of_each(monkeypatch):
    def with_another_rank(found, kind, group):
        larger = kind == torch.distributed.ReduceOp.MAX
        found.copy_((torch.maximum if larger else torch.minimum)(found, torch.tensor([3, 1])))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another_rank)
    assert World(0, 2, torch.device("cpu")).most([1, 4]) == [3, 4]


@pytest.mark.long
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
        nodes = ast.walk(ast.parse(file.read_text()))
        used = {node.attr for node in nodes if hasattr(node, "attr")}
        assert not used & OBJECT_COLLECTIVES, file


PROGRAM = """
import atexit, json, sys
started = []
sys.addaudithook(lambda event, given: event == "subprocess.Popen" and started.append(given[1]))
import psutil, torch
from rlhf_pipeline.distributed.world import join
connected = torch.distributed.is_initialized
# runs after what join registers
atexit.register(lambda: print(json.dumps(found | {"at the end": connected()})))
join(0, timeout_s=600).barrier()
sockets = psutil.Process().net_connections("inet")
found = {
    "connected": connected(),
    "listens at": sorted({socket.laddr.ip for socket in sockets if socket.status == "LISTEN"}),
    "started": [one for one in started if "ldconfig" not in one[0]],
    "setuptools": "setuptools" in sys.modules,
}
"""


def test_a_rank_starts_no_compiler_and_closes_its_connections_at_its_end(
    rank_environment, tmp_path
):
    """Threads of an open process group can abort a process after its work: exit code -6, not 0.

    DeepSpeed probes all its operations when the table of them is first read. Its shared-memory
    operation would need a compiler and leave 69 MB per rank in /dev/shm. The store of torch would
    listen at "::", every interface. The `ldconfig` is that of a library of httpx.
    """
    no_compiler = {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    variables = os.environ | rank_environment | no_compiler
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not any(tmp_path.iterdir())
    buffers = f"deepspeed_allreduce_buffer_*_{variables['MASTER_PORT']}_*"
    assert not list(Path("/dev/shm").glob(buffers))
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "connected": True, "listens at": ["127.0.0.1"], "started": [], "setuptools": False,
        "at the end": False,
    }  # fmt: skip


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that DeepSpeed and torch find; returns the list of devices made current."""
    current = []
    accelerator = SimpleNamespace(
        device_name=lambda: "cuda",
        current_device_name=lambda: f"cuda:{current[-1]}",
        communication_backend_name=lambda: "nccl",
    )
    monkeypatch.setattr(module, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("here", "elsewhere", "expected"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_ranks_multiply_by_onednn_if_all_prefer_it(world, monkeypatch, here, elsewhere, expected):
    monkeypatch.setattr(module, "prefers_onednn", lambda: here)
    monkeypatch.setattr(World, "any", lambda self, refuses: refuses or not elsewhere)
    join(0, timeout_s=60)
    assert uses_onednn() is expected


def test_hidden_gpus_are_not_used(world, monkeypatch):
    """DS_ACCELERATOR is cpu here. DeepSpeed's launcher makes hidden GPUs visible to its ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert join(0, timeout_s=60).device == torch.device("cpu")
    model = nn.Module()
    model.config = SimpleNamespace(hidden_size=32)
    settings = partial(dict, zero_optimization={"stage": 0})
    assert loaded(lambda precision: model, "fp32", settings)[1]["on_gpu"] is False
    assert not on_gpu()


def test_a_gpu_that_torch_does_not_find_is_reported(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    expected = r"torch: found 2 GPUs with CUDA_VISIBLE_DEVICES=4,5, expected at least 3"
    with pytest.raises(StageError, match=expected):
        take_device()
    assert gpus == []


def test_a_rank_joins_with_the_gpu_of_its_local_number(gpus, monkeypatch, rank_environment):
    """NCCL then connects at once by the rank's GPU, and guesses no device in a barrier.

    DeepSpeed's table probes the compilers of an operation that is asked for. DeepSpeed passes no
    timeout; torch's default for NCCL is 10 minutes. All groups of torch are replaced.
    """
    seen, operations, distributed = {}, {}, torch.distributed
    for name, value in (rank_environment | {"LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    for owner, name, instead in (
        (distributed, "is_initialized", lambda: False),
        (module, "TCPStore", lambda *arguments, **options: None),
        (socket, "create_server", lambda *arguments, **options: socket.socket()),
        (distributed, "init_process_group", lambda *arguments, **options: seen.update(options)),
        (distributed, "new_group", lambda **options: None),
        (distributed, "get_rank", lambda: 0),
        (distributed, "get_world_size", lambda: 1),
        (module.deepspeed.ops, "__compatible_ops__", operations),
        (module.deepspeed, "init_distributed", lambda **options: None),
        (module.atexit, "register", lambda function: None),
    ):
        monkeypatch.setattr(owner, name, instead)
    assert join(0, timeout_s=4321).device == seen["device_id"] == torch.device("cuda", 1)
    assert gpus == [1]
    assert module.deepspeed.ops.__compatible_ops__ is operations and operations == {}
    for backend in ("nccl", "gloo"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(seconds=4321)
