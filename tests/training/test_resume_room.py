"""The room that a checkpoint takes: what is asked for is what is written, and no more."""

from dataclasses import replace
from functools import partial

import pytest

from rlhf_pipeline.errors import StageError


@pytest.mark.parametrize(("zero_stage", "fits"), [(0, True), (1, False)])
def test_only_sharded_engines_are_counted_once_a_rank(world, make_model, disk, zero_stage, fits):
    """At ZeRO stage 0 the first rank alone writes. With room for one copy: weights and two moments, 12 bytes a number."""
    from rlhf_pipeline.config.training import TrainedModelConfig
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.models.loading import load_policy
    from rlhf_pipeline.training.resume import Checkpoints

    config = TrainedModelConfig.model_validate(
        {
            "optimizer": {"learning_rate": 1e-3},
            "deepspeed": {"precision": "fp32", "zero_stage": zero_stage},
        }
    )
    engine = train_engine(partial(load_policy, make_model("llama")), config, 4)
    numbers = sum(parameter.numel() for parameter in engine.module.parameters())
    checkpoints = Checkpoints(
        disk.path / "checkpoints", replace(world, size=2), {"actor": engine}, keep=2
    )
    disk.leave(12 * numbers + 2**17)
    if fits:
        checkpoints.save(1, {})
        assert (
            disk.path / "checkpoints" / "step-00000001" / "actor" / "rank0.safetensors"
        ).is_file()
    else:
        with pytest.raises(
            StageError,
            match=r"the checkpoint of step 1 takes .* MiB left; make room .* it goes on from",
        ):
            checkpoints.save(1, {})
        assert list((disk.path / "checkpoints").iterdir()) == []


def test_a_model_is_not_begun_where_it_does_not_fit(tokenizer, make_model, disk):
    """Tied weights are written once: a model of 4 bytes a number fits where two of its embeddings would not."""
    from rlhf_pipeline.distributed.model_files import save_model
    from rlhf_pipeline.models.loading import load_policy

    model = load_policy(make_model("qwen2", vocabulary=2048), "fp32")  # 0.25 MiB of embeddings
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    disk.leave(size - 2**12)
    with pytest.raises(
        StageError, match=r"the model for .*/best takes .* MiB, and .* MiB left; make room"
    ):
        save_model(model, tokenizer, disk.path / "best")
    assert not (disk.path / "best").exists()
    disk.make_room()
    disk.leave(size + 2**17)  # and the tokenizer
    save_model(model, tokenizer, disk.path / "best")
    assert (disk.path / "best" / "model.safetensors").is_file()
