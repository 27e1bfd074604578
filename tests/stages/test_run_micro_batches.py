"""Micro batches are halved, and nothing else, down to one."""

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.stages.run import adjusted, halved

SFT = SFTConfig.model_validate(
    {
        "epochs": 1,
        "batch_size": 8,
        "micro_batch_tokens": 5,
        "optimizer": {"learning_rate": 1e-3},
    }
)


def test_only_micro_batches_are_halved():
    config = {"sft": SFT, "evaluate": EvaluateConfig(micro_batch_tokens=1)}
    smaller = halved(config)
    assert adjusted(config, smaller) == {
        "sft.micro_batch_tokens": {"configured": 5, "used": 2},
        "evaluate.sampling.batch_size_per_gpu": {"configured": 64, "used": 32},
    }


def test_micro_batches_of_one_cannot_be_halved():
    assert halved({"sft": SFT.model_copy(update={"micro_batch_tokens": 1})}) is None
    assert adjusted({"sft": SFT}, {"sft": SFT}) == {}
