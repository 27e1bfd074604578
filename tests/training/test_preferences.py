"""Batches of comparisons, their ranking by scores, and which model DPO loads as its reference."""

import pytest
import torch

from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.sample import IterativeDPOConfig
from rlhf_pipeline.models.loading import load_policy
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.training.preferences import load_reference, pairs, ranking_sums

ROWS = {
    "prompt_ids": [[5, 6, 7], [8], [9, 10]],
    "chosen_ids": [[20, 1], [21, 22, 23, 1], [24, 1]],
    "rejected_ids": [[30, 31, 1], [1], [32, 33, 34, 35, 1]],
}


def test_the_lengths_of_a_pair_are_those_of_both_of_its_rows():
    assert pairs(ROWS, pad_id=0).lengths.tolist() == [
        [[3, 2], [3, 3]], [[1, 4], [1, 1]], [[2, 2], [2, 5]]
    ]  # fmt: skip


def test_a_tie_counts_half():
    """Margins 2, 0, -3, 0: one ranked as preferred and two ties."""
    sums = ranking_sums(torch.tensor([3.0, 1.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 3.0, 5.0]))
    assert {name: value.item() for name, value in sums.items()} == {
        "pairs": 4.0, "correct": 2.0, "margin": -1.0, "chosen": 9.0,
    }  # fmt: skip


BLOCK = {
    "batch_size": 2, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 1e-3}
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({}, (), "sft_model"),
        ({"lora": {}}, (), None),  # the policy with its adapters off
        ({"loss": "simpo"}, (), None),
        ({}, ("reference",), "reference"),
        ({"lora": {}}, ("reference",), "reference"),  # which is not the start of the adapters
    ],
)
def test_the_reference_is_the_start_unless_another_model_is_given(
    make_model, world, tmp_path, changes, given, expected
):
    models = {name: make_model(seed=n) for n, name in enumerate(("sft_model", *given))}
    job = LaunchedJob("dpo", "f", 1, {}, models, {}, tmp_path, 60.0)
    found = load_reference(job, DPOConfig.model_validate(BLOCK | changes), world)
    if expected is None:
        assert found is None
        return
    weights, others = found.state_dict(), load_policy(models[expected], "fp32").state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_a_reference_that_stays_is_a_model_of_its_own_also_with_lora():
    """So the plan counts it. Only a loss with a reference has one that stays."""
    own = IterativeDPOConfig.model_validate(BLOCK | {"lora": {}})
    fixed = own.model_copy(update={"fixed_reference": True})
    assert [model.name for model in own.models()] == ["iterative_dpo"]
    assert [model.name for model in fixed.models()] == ["iterative_dpo", "reference"]
    with pytest.raises(ValueError, match=r"fixed_reference: found True with loss simpo"):
        IterativeDPOConfig.model_validate(BLOCK | {"loss": "simpo", "fixed_reference": True})
