"""The loss of supervised fine-tuning, in any batch."""

import math

import pytest
import torch

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import grouped
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.training.sft import SFTTask

ROWS = {
    "id": ["a", "b", "c", "d"],
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


def only(*rows):
    return {name: [values[row] for row in rows] for name, values in ROWS.items()}


def nll_by_hand(model, row):
    """The loss of a row alone, without padding, from the tokens before each learned token."""
    ids = torch.tensor(ROWS["prompt_ids"][row] + ROWS["response_ids"][row])
    learned = [False] * len(ROWS["prompt_ids"][row]) + ROWS["loss_mask"][row]
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return -sum(logprobs[at - 1, ids[at]] for at in range(1, len(ids)) if learned[at])


def test_the_policy_s_tokens_are_those_that_the_loss_includes(task):
    batch = task.collate(only(0, 3))
    assert batch.answers.action_mask.tolist() == [
        [True, True, False, False, False],
        [True, False, False, False, True],
    ]
    assert batch.answers.response_ids.tolist() == [[20, 1, 0, 0, 0], [26, 27, 1, 28, 1]]
    assert batch.lengths.sum((1, 2)).tolist() == [7, 8]


@pytest.mark.parametrize("tokens", [1, 8, 20, 1000])
def test_loss_gradient_and_metrics_are_means_over_learned_tokens(task, model, tokens):
    """Whatever the micro batches."""
    expected = sum(nll_by_hand(model, row) for row in range(4)) / LEARNED
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    batch, total, sums = task.collate(ROWS), 0.0, {}
    for index in grouped(batch.lengths, tokens, padded=False):
        loss, found = task.loss(model, batch.rows(index), task.weight(batch))
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in found.items()}
    assert total == pytest.approx(expected.item(), rel=1e-5)
    assert task.metrics(sums) == pytest.approx(
        {"loss": expected.item(), "perplexity": math.exp(expected.item()), "tokens": LEARNED},
        rel=1e-5,
    )
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_tokens_that_are_not_learned_are_still_context(task, model):
    """A later turn of the user has no loss and changes the loss of the answer after it."""
    freeze(model)
    other = only(1) | {"response_ids": [[21, 1, 30, 31, 24, 1]]}
    said, changed = (
        task.loss(model, task.collate(rows), torch.tensor(1.0))[0].item()
        for rows in (only(1), other)
    )
    assert said != pytest.approx(changed, rel=1e-6)
    ids = torch.tensor([[10, 21, 1, 30, 31, 24, 1]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    by_hand = -(logprobs[0, 21] + logprobs[1, 1] + logprobs[4, 24] + logprobs[5, 1]).item()
    assert changed == pytest.approx(by_hand, rel=1e-5)
