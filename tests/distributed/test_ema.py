"""The average of an engine's weights, at every ZeRO stage.

Two real ranks run this file as a program, all settings in one launch.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

SETTINGS = {
    "fp32, stage 0": ("fp32", 0), "fp32, stage 1": ("fp32", 1), "fp32, stage 2": ("fp32", 2),
    "fp32, stage 3": ("fp32", 3), "bf16, stage 2": ("bf16", 2), "bf16, stage 3": ("bf16", 3),
}  # fmt: skip
DECAY = 0.75
STEPS = 3


def train(
    checkpoint: str, precision: str, stage: int, *, swap: bool
) -> dict[str, dict[str, torch.Tensor]]:
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
    engine = train_engine(partial(load_policy, Path(checkpoint)), config, STEPS)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    def masters() -> dict[str, torch.Tensor]:
        if stage == 0:
            return {
                name: parameter.detach().clone()
                for name, parameter in engine.module.named_parameters()
            }
        return {
            names[id(p)]: safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()
        }

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in whole_state_dict(engine.module).items()}

    ema, expected, averages = EMA(engine, DECAY), masters(), {}
    for step in range(STEPS):
        ids = torch.arange(5, 13).view(1, -1) + step + torch.distributed.get_rank()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        ema.update()
        now = masters()
        expected = {name: DECAY * mean + (1 - DECAY) * now[name] for name, mean in expected.items()}
        if swap:
            with ema.in_place():
                averages = weights()
    return {"last": weights(), "masters": masters(), "averages": averages, "expected": expected}


def main(checkpoint: str, folder: Path) -> None:
    from rlhf_pipeline.distributed.world import join

    world = join(1, timeout_s=600)
    for name, (precision, stage) in SETTINGS.items():
        results = {
            kind: train(checkpoint, precision, stage, swap=kind == "swapped")
            for kind in ("swapped", "not swapped")
        }
        if world.rank == 0:
            torch.save(results, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def results(on_ranks, make_model):
    folder = on_ranks(__file__, str(make_model("llama", seed=1)))
    return {name: torch.load(folder / f"{name}.pt") for name in SETTINGS}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_the_average_is_that_of_the_fp32_weights(results, name):
    """Swapped in, it equals the average of DeepSpeed's fp32 weights in the model's precision."""
    swapped = results[name]["swapped"]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[SETTINGS[name][0]]
    for key, value in swapped["expected"].items():
        found = swapped["averages"][key]
        assert found.dtype == dtype
        torch.testing.assert_close(
            found, value.to(dtype), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-7
        )
        assert not torch.equal(found, swapped["last"][key])


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_swapping_the_average_changes_no_bit_of_training(results, name):
    for kind in ("last", "masters"):
        swapped, not_swapped = results[name]["swapped"][kind], results[name]["not swapped"][kind]
        assert all(torch.equal(swapped[key], value) for key, value in not_swapped.items())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
