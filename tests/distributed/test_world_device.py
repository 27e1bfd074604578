"""The device of a rank: DeepSpeed's accelerator decides for all parts of a program."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_pipeline.distributed import world as module
from rlhf_pipeline.distributed.loading import loaded
from rlhf_pipeline.distributed.world import join, on_gpu, take_device
from rlhf_pipeline.errors import StageError


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that DeepSpeed and torch find; returns the list of devices made current."""
    current = []
    accelerator = SimpleNamespace(device_name=lambda: "cuda")
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
