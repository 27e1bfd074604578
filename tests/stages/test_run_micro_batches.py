"""Micro batches are halved, and nothing else, down to one or to the longest row."""

import pytest

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.run import adjusted, check_row, halved

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


OUT_OF_MEMORY = StageError("stage sft failed", cause="GPU memory")


@pytest.mark.parametrize("row", [5, 6])
def test_a_row_that_fills_a_micro_batch_is_never_cut(row):
    with pytest.raises(StageError, match=rf"failed\n.*found a row of {row} tokens.*Fix: ") as found:
        check_row({"sft": SFT}, row, OUT_OF_MEMORY)
    assert "expected fewer than sft.micro_batch_tokens (5)" in str(found.value)
    assert found.value.cause == "GPU memory"


def test_smaller_micro_batches_of_several_rows_or_responses_need_less_memory():
    check_row({"sft": SFT}, 4, OUT_OF_MEMORY)
    config = EvaluateConfig(micro_batch_tokens=1, sampling={"batch_size_per_gpu": 2})
    check_row({"evaluate": config}, 9, OUT_OF_MEMORY)
    config = EvaluateConfig(micro_batch_tokens=1, sampling={"batch_size_per_gpu": 1})
    with pytest.raises(StageError):
        check_row({"evaluate": config}, 9, OUT_OF_MEMORY)
