"""The average of an engine's weights, at every ZeRO stage, on two ranks of the lab."""

from functools import partial

import pytest
import torch

CASES = {
    f"{precision}, stage {stage}": (precision, stage)
    for precision, stage in [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 2),
                             ("bf16", 3)]
}  # fmt: skip
DECAY, STEPS = 0.75, 3


def train(lab, precision: str, stage: int, *, swap: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after some steps; with `swap`, the average is swapped in and out after each step."""
    from deepspeed.utils import safe_get_full_fp32_param

    from rlhf_pipeline.config.training import TrainedModelConfig
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.distributed.zero import EMA, whole_state_dict
    from rlhf_pipeline.models.loading import load_policy

    config = TrainedModelConfig.model_validate(
        {
            "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0, "schedule": "constant"},
            "deepspeed": {"zero_stage": stage, "precision": precision},
        }
    )
    engine = train_engine(partial(load_policy, lab.models["llama"]), config, STEPS)
    whole = torch.Tensor.detach if stage == 0 else safe_get_full_fp32_param

    def masters() -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in engine.module.named_parameters()}

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in whole_state_dict(engine.module).items()}

    ema, expected, averages = EMA(engine, DECAY), masters(), {}
    for step in range(STEPS):
        ids = torch.arange(5, 13).view(1, -1) + step + lab.world.rank
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        ema.update()
        now = masters()
        expected = {name: DECAY * mean + (1 - DECAY) * now[name] for name, mean in expected.items()}
        if swap:
            with ema.in_place():
                averages = weights()
    return {"last": weights(), "masters": masters(), "averages": averages, "expected": expected}


def case(lab, precision: str, stage: int) -> dict[str, bool] | None:
    swapped, plain = (train(lab, precision, stage, swap=swap) for swap in (True, False))
    if lab.world.rank:
        return None  # at stage 3, only the first rank has whole weights
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    relative = 1e-6 if precision == "fp32" else 8e-3
    averages, last = swapped["averages"], swapped["last"]
    return {
        "is the average": all(
            averages[name].dtype == dtype
            and torch.allclose(averages[name], mean.to(dtype), rtol=relative, atol=1e-7)
            for name, mean in swapped["expected"].items()
        ),
        "differs": not any(torch.equal(averages[name], last[name]) for name in averages),
        "changes nothing": all(
            torch.equal(swapped[kind][name], value)
            for kind in ("last", "masters")
            for name, value in plain[kind].items()
        ),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_average_is_that_of_the_fp32_weights_and_training_is_unchanged(cells, name):
    """Swapped in, it equals the average of DeepSpeed's fp32 weights in the model's precision."""
    assert cells[name] == {"is the average": True, "differs": True, "changes nothing": True}
