"""The pretend accelerator refuses and allows what a GPU does, and counts where a GPU waits."""

import copy
from contextlib import nullcontext

import pytest
import torch
from strict_device import MisplacedTensorError, StrictDevice
from tiny_jobs import MAIN, logged, tiny_job, trained

from rlhf_pipeline.distributed import engine

REFUSED = {
    "sum": lambda x: x + torch.ones(2, 3),
    "product": lambda x: x @ torch.ones(3, 2),
    "layer": lambda x: torch.nn.Linear(3, 4)(x),
    "rows of an embedding": lambda x: torch.nn.functional.embedding(torch.tensor([0]), x),
    "stack of numbers": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "number as a result": lambda x: torch.tensor(1.0).add_(x.sum()),
    "index on the device": lambda x: torch.ones(3)[x[0].long()],
    "value at an index": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1, 3)),
    "collective": lambda x: torch.distributed.all_reduce(torch.ones(2)),
    "device of another rank": lambda x: x.to("privateuseone:1"),
    "data for another rank": lambda x: torch.zeros(2, device="privateuseone:1"),
}
ALLOWED = {
    "number": lambda x: x + torch.tensor(1.0),
    "masked fill": lambda x: x.masked_fill(x > 0, torch.tensor(1.0)),
    "index": lambda x: x[torch.tensor([0])],
    "copy": lambda x: x.copy_(torch.ones(2, 3)),
    "same device": lambda x: x.to("privateuseone"),
    "other tensor's device": lambda x: torch.ones(2).to(x),
    "view": lambda x: x[0].view(3, 1),
    "like": lambda x: torch.zeros_like(x),
    "factory": lambda x: torch.arange(3, device=x.device),
    "data": lambda x: torch.tensor([1.0], device=x.device),
    "number type": lambda x: x.to(torch.float64),
    "copy of an object": lambda x: copy.deepcopy(torch.nn.Parameter(x)),
}
WAITS = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).all()),
    "list": lambda x: x.tolist(),
    "main memory": lambda x: x.cpu(),
    "copy to main memory": lambda x: torch.ones(2, 3).copy_(x),
    "comparison": lambda x: torch.equal(x, x),
    "selection": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "index in main memory": lambda x: x[torch.tensor([0])],
    "blocking copy": lambda x: torch.ones(2).to(x.device),
    "data": lambda x: torch.tensor(1.0, device=x.device),
}
NO_WAITS = {
    "operators": lambda x: torch.nn.functional.softmax(x * 2, -1)[:, 1:].argmax(-1),
    "number": lambda x: x.fill_(1.0) + torch.tensor(1.0),
    "copy": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "copy to main memory": lambda x: x.to("cpu", non_blocking=True),
    "constant": lambda x: torch.full((), 1.0, device=x.device),
    "main memory": lambda x: torch.ones(2).sum().item(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_devices_do_not_mix(strict, name):
    with pytest.raises(MisplacedTensorError):
        REFUSED[name](torch.ones(2, 3, device=strict.device))


@pytest.mark.parametrize("name", ALLOWED)
def test_results_are_on_the_device(strict, name):
    result = ALLOWED[name](torch.ones(2, 3, device=strict.device))
    assert result.device == strict.device and not result.is_cpu


def test_tensors_of_the_device_have_no_numpy_array(strict):
    with pytest.raises(TypeError, match=r"use Tensor\.cpu"):
        torch.ones(2, device=strict.device).numpy()
    assert torch.ones(2, device=strict.device).cpu().device.type == "cpu"


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_once(strict, name):
    x = torch.ones(2, 3, device=strict.device)
    WAITS[name](x)
    (wait,) = strict.waits
    assert wait.file == __file__ and not wait.own


@pytest.mark.parametrize("name", NO_WAITS)
def test_other_operators_do_not_wait(strict, name):
    NO_WAITS[name](torch.ones(2, 3, device=strict.device))
    assert not strict.waits


def test_hooks_of_the_backward_pass_are_on_the_device(strict):
    """ZeRO-1 and 2 make their buffers there."""
    layer, made = torch.nn.Linear(3, 4).to(strict.device), []
    layer.weight.register_post_accumulate_grad_hook(
        lambda weight: made.append(torch.empty(2, device=weight.device) + weight.grad.sum())
    )
    layer(torch.ones(2, 3, device=strict.device)).sum().backward()
    assert [tensor.device for tensor in (*made, layer.bias.grad)] == [strict.device] * 2


def test_nothing_is_left_behind():
    before = torch.Tensor.device, torch.Tensor.to, torch.Tensor.tolist
    with StrictDevice() as strict:
        x = torch.ones(2, device=strict.device)
    assert (torch.Tensor.device, torch.Tensor.to, torch.Tensor.tolist) == before
    assert x.device.type == "cpu" and (x + torch.ones(2)).tolist() == [2.0, 2.0]
    assert not hasattr(torch, "privateuseone")


def test_training_is_the_same_as_on_the_cpu(world, program_inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LeanStep", lambda engine: None)  # its norm rounds differently
    blocks = {"actor": trained(2), "critic": trained(1)}
    for name, device in (("cpu", nullcontext), ("strict", StrictDevice)):
        with device():
            MAIN["ppo"](tiny_job("ppo", program_inputs, tmp_path / name, blocks))
    cpu, strict = logged(tmp_path / "cpu"), logged(tmp_path / "strict")
    for before, after in zip(cpu, strict, strict=True):
        # torch 2.11 decodes on another device by another attention kernel.
        gaps = before.pop("rollout/logprob_gap"), after.pop("rollout/logprob_gap")
        assert max(gaps) < 1e-6
    assert cpu == strict
