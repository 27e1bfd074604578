"""The precision in which gradients of micro batches add up, on two ranks."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.optimizer_step import optimizer_step
from rlhf_pipeline.distributed.world import join
from rlhf_pipeline.models.loading import load_policy

SMALL = 2.0**-9
"""Less than half of the distance from any bf16 number to the next one, as a share of it."""
CASES = {
    f"ZeRO {stage}, {name}": {"zero_stage": stage, "precision": "bf16", **fields}
    for stage in (1, 2, 3)
    for name, fields in {
        "default": {},
        "bf16": {"accumulate": "bf16"},
        "offload": {"offload_optimizer": True},
    }.items()
}


def growth(model: str, deepspeed: dict, world) -> float:
    """The gradient norm of a batch and 64 copies of it with a small weight, divided by its own."""
    config = TrainedModelConfig.model_validate(
        {"optimizer": {"learning_rate": 1e-12, "max_grad_norm": 1e9}, "deepspeed": deepspeed}
    )
    engine = train_engine(partial(load_policy, Path(model)), config, 2)

    def loss(weight):
        return weight * engine(torch.tensor([[5, 6, 7]])).logits.float().square().mean(), {}

    norms = []
    for weights in ([1.0], [1.0] + [SMALL] * 64):
        optimizer_step(engine, world, [partial(loss, weight) for weight in weights])
        norms.append(float(engine.get_global_grad_norm()))
    return norms[1] / norms[0]


def main(model: str, folder: Path) -> None:
    world = join(0, timeout_s=600)
    found = {name: growth(model, deepspeed, world) for name, deepspeed in CASES.items()}
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(on_ranks, make_model):
    return json.loads((on_ranks(__file__, make_model("llama")) / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_small_gradients_add_up(found, case):
    """1 + 64 * 2^-9 = 1.125. In bf16, 1 + 2^-9 is 1, however often it is added."""
    assert found[case] == pytest.approx(1.0 if case.endswith("bf16") else 1.125, rel=1e-3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
