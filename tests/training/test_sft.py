"""The loss of supervised fine-tuning, in any batch."""

import math

import pytest
import torch
from training.by_hand import metrics_of_micro_batches, token_logprobs

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.training.sft import SFTTask

ROWS = {
    "prompt_ids": [[5, 6, 7, 8, 9], [10], [11, 12], [13, 14, 15]],
    "response_ids": [[20, 1], [21, 1, 22, 23, 24, 1], [25], [26, 27, 1, 28, 1]],
    "loss_mask": [
        [True, True],
        [True, True, False, False, True, True],
        [True],
        [True, False, False, False, True],
    ],
}
LEARNED = 2 + 4 + 1 + 2


@pytest.fixture(scope="module")
def folder(make_model):
    return make_model("llama")


@pytest.fixture(scope="module")
def task(folder):
    return SFTTask(TokenContract.read(folder))


@pytest.fixture
def model(folder):
    return load_policy(folder, "fp32")


def nll_by_hand(model, rows):
    """The losses of the learned tokens of all rows, each row alone."""
    columns = (rows[name] for name in ("prompt_ids", "response_ids", "loss_mask"))
    return -sum(
        token_logprobs(model, prompt, response)[torch.tensor(learned)].sum()
        for prompt, response, learned in zip(*columns, strict=True)
    )


@pytest.mark.parametrize("tokens", [1, 8, 20, 1000])
def test_loss_gradient_and_metrics_are_means_over_learned_tokens(task, model, tokens):
    """Whatever the micro batches."""
    expected = nll_by_hand(model, ROWS) / LEARNED
    assert metrics_of_micro_batches(task, model, ROWS, tokens, expected) == pytest.approx(
        {"loss": expected.item(), "perplexity": math.exp(expected.item()), "tokens": LEARNED},
        rel=1e-5,
    )


def test_tokens_that_are_not_learned_are_still_context(task, model):
    """A later turn of the user has no loss and changes the loss of the answer after it."""
    freeze(model)
    row = {name: values[1:2] for name, values in ROWS.items()}
    other = row | {"response_ids": [[21, 1, 30, 31, 24, 1]]}
    said, changed = (
        task.loss(model, task.collate(rows), torch.tensor(1.0))[0].item() for rows in (row, other)
    )
    assert said != pytest.approx(changed, rel=1e-6)
    assert changed == pytest.approx(nll_by_hand(model, other).item(), rel=1e-5)
