"""The step of a single rank on a CPU beside DeepSpeed's own."""

from functools import partial

import pytest
import torch

from rlhf_pipeline.config.training import TrainedModelConfig
from rlhf_pipeline.distributed import engine as distributed_engine
from rlhf_pipeline.distributed.engine import train_engine
from rlhf_pipeline.distributed.optimizer_step import grad_norm, optimizer_step
from rlhf_pipeline.distributed.zero import fp32_shards
from rlhf_pipeline.models.loading import load_policy

STEPS = 4
BATCHES = torch.arange(5, 41).view(3, 2, 6)


def engine_of(folder, settings, optimizer, lean, monkeypatch):
    with monkeypatch.context() as patch:
        if not lean:
            patch.setattr(distributed_engine, "LeanStep", lambda engine: None)
        # With a large eps, an update is not the sign of a gradient that rounding may turn.
        fields = {"learning_rate": 0.1, "eps": 1.0, "warmup_fraction": 0.5, "weight_decay": 0.1}
        fields |= optimizer
        config = TrainedModelConfig.model_validate({"optimizer": fields, "deepspeed": settings})
        return train_engine(partial(load_policy, folder), config, 6)


def trained(engine, world, steps, losses):
    """Take steps of `losses` micro batches each; return the gradient norm of each step."""

    def loss(ids):
        return engine(input_ids=ids, labels=ids).loss, {}

    norms = []
    for step in range(steps):
        batches = [BATCHES[(step + i) % 3] for i in range(losses)]
        optimizer_step(engine, world, [partial(loss, ids) for ids in batches])
        norms.append(float(grad_norm(engine)))
    return norms


@pytest.mark.parametrize("optimizer", [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 1e9}])
@pytest.mark.parametrize(
    ("stage", "precision", "accumulate", "losses"),
    [
        # Of several micro batches at stage 1, DeepSpeed rounds the sum to bf16; this step does not.
        (1, "bf16", "fp32", 1),
        (2, "bf16", "fp32", 3),
        (1, "bf16", "bf16", 3),
        (2, "fp32", "fp32", 3),
    ],
)
def test_weights_and_norms_are_those_of_deepspeed(
    world, make_model, monkeypatch, stage, precision, accumulate, losses, optimizer
):
    settings = {"zero_stage": stage, "precision": precision, "accumulate": accumulate}
    ours, theirs = (
        engine_of(make_model("llama"), settings, optimizer, lean, monkeypatch)
        for lean in (True, False)
    )
    norms = [trained(engine, world, STEPS, losses) for engine in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3 if precision == "bf16" else 1e-5)
    for own, other in zip(fp32_shards(ours), fp32_shards(theirs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    rounded = torch.bfloat16 if precision == "bf16" else torch.float32
    for (name, own), other in zip(
        ours.module.named_parameters(), theirs.module.parameters(), strict=True
    ):
        assert own.dtype == rounded and own.grad is None, name
        torch.testing.assert_close(own, other, rtol=2**-7, atol=1e-5, msg=name)


def test_a_step_whose_gradient_is_not_finite_changes_nothing(world, make_model, monkeypatch):
    settings = {"zero_stage": 1, "precision": "bf16"}
    engine = engine_of(make_model("llama"), settings, {}, True, monkeypatch)
    trained(engine, world, 1, 1)
    before = [shard.clone() for shard in fp32_shards(engine)]
    ids = BATCHES[0]
    loss = lambda: (engine(input_ids=ids, labels=ids).loss * torch.inf, {})  # noqa: E731
    optimizer_step(engine, world, [loss])
    assert float(grad_norm(engine)) == torch.inf and not engine.was_step_applied()
    for shard, other in zip(fp32_shards(engine), before, strict=True):
        assert torch.equal(shard, other)
    trained(engine, world, 1, 2)
    assert not torch.equal(fp32_shards(engine)[0], before[0])


def test_parameters_larger_than_a_piece(world, make_model, monkeypatch):
    settings = {"zero_stage": 1, "precision": "bf16"}
    whole = engine_of(make_model("opt"), settings, {}, True, monkeypatch)
    monkeypatch.setattr("rlhf_pipeline.distributed.lean_step.SIZE", 100)
    parts = engine_of(make_model("opt"), settings, {}, True, monkeypatch)
    for engine in (whole, parts):
        trained(engine, world, 2, 1)
    for own, other in zip(fp32_shards(parts), fp32_shards(whole), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
