"""Weight decay shrinks matrices and leaves norms and biases alone, at every ZeRO stage."""

from functools import partial

import pytest
import torch

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.zero import whole_state_dict
from rlhf_pipeline.models.loading import load_policy

IDS = torch.arange(5, 17).view(2, 6)


def make_engine(folder, weight_decay: float, **fields):
    config = {
        "optimizer": {
            "learning_rate": 0.1,
            "schedule": "constant",
            "warmup_fraction": 0.0,
            "weight_decay": weight_decay,
        }
    }
    return train_engine(
        partial(load_policy, folder), TrainedModelConfig.model_validate(config | fields), 1
    )


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


def test_without_decay_the_optimizer_has_one_group(world, make_model):
    """Another order of the parameters would change the rounding of sums over them."""
    engine = make_engine(make_model("opt"), 0.0)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.0]


def test_an_adapter_has_matrices_only(world, make_model):
    """DeepSpeed does not accept an empty group."""
    engine = make_engine(make_model("llama"), 0.5, lora={"rank": 2})
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.5]
