"""Loading models into engines: where weights go, the learning rate, weight decay, freed memory."""

from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from transformers import get_scheduler

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, OptimizerConfig, TrainedModelConfig
from rlhf_pipeline.distributed import engine as engines
from rlhf_pipeline.distributed.engine import frozen_model, train_engine
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.models import kernels
from rlhf_pipeline.models.loading import load_policy

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")


class AskedError(Exception):
    """Carries the arguments of the load."""


def load(precision, **arguments):
    raise AskedError(arguments)


def trained(world, **deepspeed):
    fields = {"optimizer": {"learning_rate": 1e-3}, "deepspeed": deepspeed}
    train_engine(load, TrainedModelConfig.model_validate(fields), 1)


def frozen(world, **deepspeed):
    frozen_model(load, FrozenDeepSpeedConfig(**deepspeed), world)


@pytest.mark.parametrize(
    ("make", "zero_stage", "precision", "device", "expected"),
    [
        (trained, 0, "fp32", GPU, {"device": GPU}),
        (trained, 1, "bf16", GPU, {"device": GPU}),
        (trained, 2, "bf16", GPU, {"device": GPU}),
        (trained, 3, "bf16", GPU, {}),
        (trained, 1, "bf16", CPU, {}),
        (frozen, 0, "bf16", GPU, {"device": GPU}),
        (frozen, 3, "bf16", GPU, {}),
        (frozen, 0, "fp32", CPU, {}),
    ],
)
def test_a_whole_model_is_read_onto_its_gpu_which_is_checked_before(
    world, monkeypatch, make, zero_stage, precision, device, expected
):
    checked = []
    monkeypatch.setattr(kernels, "require_sound_kernels", lambda *given: checked.append(given))
    monkeypatch.setattr(engines, "own_device", lambda: device)
    with pytest.raises(AskedError) as asked:
        make(replace(world, device=device), zero_stage=zero_stage, precision=precision)
    assert asked.value.args == (expected,)
    assert checked == [(device, precision)] * (device is GPU)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(20, 0.0), (20, 0.25), (1, 0.0), (3, 0.9)])
def test_schedules_are_those_of_transformers(name, steps, warmup):
    config = OptimizerConfig(learning_rate=1.0, schedule=name, warmup_fraction=warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=round(warmup * steps),
        num_training_steps=steps,
    )
    for step in range(steps + 1):
        factor = engines.schedule_factor(config, steps, step)
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()


IDS = torch.arange(5, 17).view(2, 6)


def make_engine(folder, weight_decay: float, **fields):
    optimizer = {"learning_rate": 0.1, "schedule": "constant", "warmup_fraction": 0.0}
    config = {"optimizer": optimizer | {"weight_decay": weight_decay}} | fields
    return train_engine(partial(load_policy, folder), TrainedModelConfig.model_validate(config), 1)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_only_matrices_decay(world, make_model, zero_stage):
    """With gradients of zero, decay alone changes the weights: by a factor of 1 - 0.1 * 0.5."""
    engine = make_engine(make_model("opt"), 0.5, deepspeed={"zero_stage": zero_stage})
    before = {name: weight.clone() for name, weight in whole_state_dict(engine.module).items()}
    engine.backward(0.0 * engine(input_ids=IDS, labels=IDS).loss)
    engine.step()
    after = whole_state_dict(engine.module)
    assert {weight.dim() for weight in before.values()} == {1, 2}
    for name, weight in before.items():
        if weight.dim() == 1:
            assert torch.equal(after[name], weight), name
        else:
            torch.testing.assert_close(after[name], 0.95 * weight)


@pytest.mark.parametrize(
    ("family", "decay", "fields"), [("opt", 0.0, {}), ("llama", 0.5, {"lora": {"rank": 2}})]
)
def test_the_optimizer_has_one_group_without_decay_and_with_adapters(
    world, make_model, family, decay, fields
):
    """Another order of the parameters would change the rounding of sums over them.

    An adapter has matrices only, and DeepSpeed does not accept an empty group.
    """
    engine = make_engine(make_model(family), decay, **fields)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [decay]


def test_freed_blocks_between_blocks_in_use_are_returned():
    """Blocks of 100 kB are never mapped one by one, so those in use pin the heap between them."""
    blocks = [torch.ones(25_000) for _ in range(2_000)]
    full = psutil.Process().memory_info().rss
    kept, blocks = blocks[::10], None
    engines.release_freed()
    returned = full - psutil.Process().memory_info().rss
    assert len(kept) == 200
    assert returned > 0.7 * 1_800 * 100_000
