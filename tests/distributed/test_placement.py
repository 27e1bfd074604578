"""Each rank reads weights onto its own device, unless ZeRO shards them while they are read."""

from dataclasses import replace

import pytest
import torch

from rlhf_pipeline.config.training import FrozenDeepSpeedConfig, TrainedModelConfig
from rlhf_pipeline.distributed import engine
from rlhf_pipeline.distributed.engine import frozen_model, train_engine

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")


class AskedError(Exception):
    """Carries the arguments of the load."""


def load(precision, **arguments):
    raise AskedError(arguments)


@pytest.fixture(autouse=True)
def _no_gpu_to_check(monkeypatch):
    for module in ("loading", "frozen_model"):
        place = f"rlhf_pipeline.distributed.{module}.require_sound_kernels"
        monkeypatch.setattr(place, lambda *arguments: None)


@pytest.mark.parametrize(
    ("zero_stage", "device", "expected"),
    [
        (0, GPU, {"device": GPU}),
        (1, GPU, {"device": GPU}),
        (2, GPU, {"device": GPU}),
        (3, GPU, {}),
        (1, CPU, {}),
    ],
)
def test_a_model_in_training(monkeypatch, zero_stage, device, expected):
    monkeypatch.setattr(engine, "own_device", lambda: device)
    fields = {"optimizer": {"learning_rate": 1e-3}, "deepspeed": {"zero_stage": zero_stage}}
    with pytest.raises(AskedError) as asked:
        train_engine(load, TrainedModelConfig.model_validate(fields), 1)
    assert asked.value.args == (expected,)


@pytest.mark.parametrize(
    ("zero_stage", "device", "expected"), [(0, GPU, {"device": GPU}), (3, GPU, {}), (0, CPU, {})]
)
def test_a_frozen_model(world, monkeypatch, zero_stage, device, expected):
    monkeypatch.setattr(engine, "own_device", lambda: device)
    config = FrozenDeepSpeedConfig(zero_stage=zero_stage, precision="fp32")
    with pytest.raises(AskedError) as asked:
        frozen_model(load, config, replace(world, device=device))
    assert asked.value.args == (expected,)
