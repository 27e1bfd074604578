"""Storages that leave a device and come back, on the pretend accelerator."""

import pytest
import torch
from strict_device import StrictDevice

from rlhf_pipeline.training import rollouts
from rlhf_pipeline.training.rollouts import in_main_memory, weights


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(rollouts, "PIECE", 8)  # the storages below have several pieces
    with StrictDevice() as device:
        yield device


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_views_lose_their_memory_and_get_equal_numbers_back(strict):
    master = torch.arange(5.0, device=strict.device)
    view, moment = master[1:3], torch.full((3,), 7, dtype=torch.bfloat16, device=strict.device)
    pointer = view.untyped_storage()._cdata
    with in_main_memory([master, moment, view], staying=[]):
        away = sizes(master, view, moment)
    found = sizes(master, view, moment)  # a tensor without memory could not be shown
    assert away == [0, 0, 0] and found == [20, 20, 6]
    assert view.untyped_storage()._cdata == pointer == master.untyped_storage()._cdata
    assert master.tolist() == [0, 1, 2, 3, 4] and view.tolist() == [1, 2]
    assert moment.tolist() == [7, 7, 7] and strict.has(view)


def test_what_shares_memory_with_something_needed_stays(strict):
    needed, other = torch.ones(4, device=strict.device), torch.ones(2, device=strict.device)
    with in_main_memory([needed[:2], other], staying=[needed[2:]]):
        found = sizes(needed, other)
    assert found == [16, 0]


def test_what_is_in_main_memory_already_stays(strict):
    """So the block changes nothing without a GPU, and nothing of `offload_optimizer`."""
    host = torch.ones(3)
    with in_main_memory([host], staying=[]):
        found = sizes(host)
    assert found == [12]


def test_they_are_back_before_another_stream_reads_them(strict, monkeypatch):
    """The copies do not wait, and ZeRO-3 gathers weights on a stream that waits for no other."""
    done, copy = [], torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *own, **how: (done.append("copy"), copy(*own, **how))
    )
    accelerator = rollouts.get_accelerator()
    monkeypatch.setattr(type(accelerator), "synchronize", lambda *_: done.append("wait"))
    with in_main_memory([torch.ones(3, device=strict.device)], staying=[]):
        pass
    assert done == ["copy", "copy", "wait"]


def test_an_error_inside_the_block_brings_them_back(strict):
    tensor = torch.ones(3, device=strict.device)
    with pytest.raises(MemoryError), in_main_memory([tensor], staying=[]):
        raise MemoryError
    found = sizes(tensor)
    assert found == [12] and tensor.tolist() == [1, 1, 1]


def test_a_sharded_weight_has_its_share_and_perhaps_the_whole():
    model = torch.nn.Linear(2, 1)
    model.weight.ds_tensor = share = torch.zeros(1)
    found = list(weights(model))
    assert [tensor.data_ptr() for tensor in found] == [
        model.weight.data_ptr(), share.data_ptr(), *[model.bias.data_ptr()] * 2
    ]  # fmt: skip
