"""The loss of DPO, in any batch."""

from dataclasses import replace

import pytest
import torch

from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.batches import grouped
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.training.dpo import DPOTask

ROWS = {
    "id": ["a", "b", "c"],
    "prompt_ids": [[5, 6, 7, 8, 9], [10], [11, 12]],
    "chosen_ids": [[20, 1], [21, 22, 23, 24, 1], [25, 1]],
    "rejected_ids": [[30, 31, 32, 1], [1], [33, 34, 35, 36, 37, 38, 1]],
}
BETA = 0.5
CONFIG = DPOConfig.model_construct(beta=BETA)


@pytest.fixture(scope="module")
def start(make_model):
    return make_model("llama", seed=1)


@pytest.fixture(scope="module")
def task(start):
    return DPOTask(TokenContract.read(start), freeze(load_policy(start, "fp32")), CONFIG)


@pytest.fixture
def model(make_model):
    """A policy with the same tokens as the reference and other weights."""
    return load_policy(make_model("llama", seed=2), "fp32")


def only(*rows):
    return {name: [values[row] for row in rows] for name, values in ROWS.items()}


def reward_by_hand(model, reference, row, answer):
    """Beta times the sum of the log ratios of the answer's tokens, without padding."""
    prompt = ROWS["prompt_ids"][row]
    ids = torch.tensor(prompt + ROWS[f"{answer}_ids"][row])
    log_ratios = model(ids[None]).logits[0].log_softmax(-1) - reference(ids[None]).logits[
        0
    ].log_softmax(-1)
    return BETA * sum(log_ratios[at - 1, ids[at]] for at in range(len(prompt), len(ids)))


def loss_by_hand(model, reference, row):
    margin = reward_by_hand(model, reference, row, "chosen") - reward_by_hand(
        model, reference, row, "rejected"
    )
    return torch.log1p(torch.exp(-margin))


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_loss_gradient_and_metrics_are_means_over_comparisons(task, model, tokens):
    """Whatever the micro batches."""
    expected = sum(loss_by_hand(model, task.reference, row) for row in range(3)) / 3
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    batch, total, sums = task.collate(ROWS), 0.0, {}
    assert task.weight(batch).item() == 3
    for index in grouped(batch.lengths, tokens, padded=False):
        loss, found = task.loss(model, batch.rows(index), task.weight(batch))
        loss.backward()
        total += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in found.items()}
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    chosen, rejected = (
        [float(reward_by_hand(model, task.reference, row, name)) for row in range(3)]
        for name in ("chosen", "rejected")
    )
    metrics = task.metrics(sums)
    assert metrics.pop("loss") == pytest.approx(expected.item(), rel=1e-5)
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True))
    assert 0 < right < 3
    assert metrics == pytest.approx(
        {
            "accuracy": right / 3, "margin": (sum(chosen) - sum(rejected)) / 3,
            "chosen_reward": sum(chosen) / 3, "rejected_reward": sum(rejected) / 3,
        },
        rel=1e-4, abs=1e-6,
    )  # fmt: skip


def test_the_reference_gets_no_gradient_and_keeps_no_activations(start, model):
    """Even if its parameters require a gradient."""
    reference, recorded = load_policy(start, "fp32"), []
    reference.register_forward_hook(
        lambda module, inputs, output: recorded.append(output.logits.requires_grad)
    )
    task = DPOTask(TokenContract.read(start), reference, CONFIG)
    task.loss(model, task.collate(ROWS), torch.tensor(3.0))[0].backward()
    assert recorded and not any(recorded)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_label_smoothing_reaches_the_loss(task, model):
    """0.8 times the loss plus 0.2 times the loss with the answers exchanged."""
    freeze(model)
    rows = only(2)
    exchanged = rows | {"chosen_ids": rows["rejected_ids"], "rejected_ids": rows["chosen_ids"]}
    smoothed = DPOTask(
        task.contract, task.reference, CONFIG.model_copy(update={"label_smoothing": 0.2})
    )
    there, back, both = (
        one.loss(model, one.collate(given), torch.tensor(1.0))[0].item()
        for one, given in ((task, rows), (task, exchanged), (smoothed, rows))
    )
    assert there != pytest.approx(back, rel=1e-2)
    assert both == pytest.approx(0.8 * there + 0.2 * back, rel=1e-5)


def test_a_loss_gets_the_lengths_and_its_rewards_are_those_of_a_mean_token(task, model):
    """IPO in the middle of the rows: beta is 1/2, so the margin of mean log ratios aims at 1."""
    freeze(model)
    normalized = replace(task, config=CONFIG.model_copy(update={"loss": "ipo"}))
    batch = task.collate(ROWS)
    loss, sums = normalized.loss(model, batch, torch.tensor(3.0))
    means = {
        answer: [
            reward_by_hand(model, task.reference, row, answer) / len(ROWS[f"{answer}_ids"][row])
            for row in range(3)
        ]
        for answer in ("chosen", "rejected")
    }
    margins = [one - other for one, other in zip(*means.values(), strict=True)]
    expected = sum((margin / BETA - 1) ** 2 for margin in margins) / 3
    torch.testing.assert_close(loss.float(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(sums["margin"].float(), sum(margins), rtol=1e-4, atol=1e-6)


def test_simpo_has_no_reference(start, model):
    """Its rewards are beta times the log-probability of a mean token."""
    freeze(model)
    config = CONFIG.model_copy(update={"loss": "simpo"})
    task = DPOTask(TokenContract.read(start), None, config)
    _, sums = task.loss(model, task.collate(only(0)), torch.tensor(1.0))
    ids = torch.tensor(ROWS["prompt_ids"][0] + ROWS["chosen_ids"][0])
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    expected = BETA * (logprobs[4, 20] + logprobs[5, 1]) / 2
    torch.testing.assert_close(sums["chosen"].float(), expected, rtol=1e-4, atol=0)


def test_sft_coef_adds_the_likelihood_of_the_chosen_answers(task, model):
    freeze(model)
    both = replace(task, config=CONFIG.model_copy(update={"sft_coef": 2.0}))
    rows, one = task.collate(only(0)), torch.tensor(1.0)
    loss, sums = both.loss(model, rows, one)
    ids = torch.tensor(ROWS["prompt_ids"][0] + ROWS["chosen_ids"][0])
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    nll = -(logprobs[4, 20] + logprobs[5, 1]) / 2
    plain, _ = task.loss(model, rows, one)
    torch.testing.assert_close(loss, plain + 2 * nll, rtol=1e-5, atol=0)
    metrics = both.metrics({name: value.item() for name, value in sums.items()})
    assert metrics["chosen_nll"] == pytest.approx(nll.item(), rel=1e-5)
