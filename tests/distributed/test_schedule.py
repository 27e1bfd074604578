"""The learning rate of every step."""

import pytest
import torch
from transformers import get_scheduler

from rlhf_pipeline.config.training import OptimizerConfig
from rlhf_pipeline.distributed.engine import schedule_factor


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
        factor = schedule_factor(config, steps, step)
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()
