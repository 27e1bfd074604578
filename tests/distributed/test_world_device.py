"""The device of a rank: DeepSpeed's accelerator decides for all parts of a program."""

import socket
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from rlhf_pipeline.distributed import world as module
from rlhf_pipeline.distributed.engine import loaded
from rlhf_pipeline.distributed.world import join, on_gpu, take_device
from rlhf_pipeline.errors import StageError


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


def test_hidden_gpus_are_not_used(world, monkeypatch):
    """DS_ACCELERATOR is cpu here. DeepSpeed's launcher makes hidden GPUs visible to its ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert join(0, timeout_s=60).device == torch.device("cpu")
    model = nn.Module()
    model.config = SimpleNamespace(hidden_size=32)
    settings = partial(dict, zero_optimization={"stage": 0})
    assert loaded(lambda precision: model, "fp32", settings)[1]["on_gpu"] is False
    assert not on_gpu()


def test_each_rank_takes_the_gpu_of_its_local_number(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert take_device() == torch.device("cuda", 1)
    assert gpus == [1]


def test_a_gpu_that_torch_does_not_find_is_reported(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    expected = r"torch: found 2 GPUs with CUDA_VISIBLE_DEVICES=4,5, expected at least 3"
    with pytest.raises(StageError, match=expected):
        take_device()
    assert gpus == []


@pytest.fixture
def joining(gpus, monkeypatch, rank_environment):
    """Lets a rank on a GPU join, with all of torch's groups and DeepSpeed's operations replaced.

    Returns what `init_process_group` got, and DeepSpeed's table of operations.
    """
    seen, operations = {}, {}
    for name, value in rank_environment.items():
        monkeypatch.setenv(name, value)
    distributed = torch.distributed
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(module, "TCPStore", lambda *arguments, **options: None)
    monkeypatch.setattr(socket, "create_server", lambda *arguments, **options: socket.socket())
    monkeypatch.setattr(
        distributed, "init_process_group", lambda *arguments, **options: seen.update(options)
    )
    monkeypatch.setattr(distributed, "new_group", lambda **options: None)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(module.deepspeed.ops, "__compatible_ops__", operations)
    monkeypatch.setattr(module.deepspeed, "init_distributed", lambda **options: None)
    monkeypatch.setattr(module.atexit, "register", lambda function: None)
    return seen, operations


def test_nccl_connects_by_the_gpu_of_the_rank(joining):
    """torch then connects at once, and guesses no device in a barrier."""
    seen, _ = joining
    assert join(0, timeout_s=60).device == torch.device("cuda", 0)
    assert seen["device_id"] == torch.device("cuda", 0)


def test_a_rank_on_a_gpu_does_not_look_for_compilers(joining):
    """DeepSpeed's table probes the compilers of an operation that is asked for."""
    _, operations = joining
    join(0, timeout_s=60)
    assert operations == {}


def test_groups_of_deepspeed_wait_as_long_as_those_of_the_project(joining):
    """DeepSpeed passes no timeout; torch's default for NCCL is 10 minutes."""
    join(0, timeout_s=4321)
    for backend in ("nccl", "gloo"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(seconds=4321)
