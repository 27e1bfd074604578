"""The disk space that is required before a checkpoint or a model is written."""

from dataclasses import replace
from functools import partial

import pytest

from rlhf_pipeline.errors import StageError


@pytest.mark.parametrize(("zero_stage", "fits"), [(0, True), (1, False)])
def test_space_is_required_for_each_rank_only_if_the_engine_is_sharded(
    world, make_model, disk, zero_stage, fits
):
    """At ZeRO stage 0, only the first rank writes. The disk has space for one copy.

    A copy contains weights and two moments, 12 bytes per number.
    """
    from rlhf_pipeline.config.training import TrainedModelConfig
    from rlhf_pipeline.distributed.engine import train_engine
    from rlhf_pipeline.models.loading import load_policy
    from rlhf_pipeline.training.checkpoints import Checkpoints

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
            match=r"the checkpoint of step 1 needs .* MiB, .* MiB free$",
        ):
            checkpoints.save(1, {})
        assert list((disk.path / "checkpoints").iterdir()) == []


def test_a_model_that_does_not_fit_is_not_written(tokenizer, make_model, disk):
    """Tied weights are written once: the model fits, a second copy of its embeddings would not."""
    from rlhf_pipeline.distributed.model_files import save_model
    from rlhf_pipeline.models.loading import load_policy

    model = load_policy(make_model("qwen2", vocabulary=2048), "fp32")  # 0.25 MiB of embeddings
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    disk.leave(size - 2**12)
    with pytest.raises(StageError, match=r"the model for .*/best needs .* MiB, .* MiB free$"):
        save_model(model, tokenizer, disk.path / "best")
    assert not (disk.path / "best").exists()
    disk.make_room()
    disk.leave(size + 2**17)  # and the tokenizer
    save_model(model, tokenizer, disk.path / "best")
    assert (disk.path / "best" / "model.safetensors").is_file()
