"""The loss of DPO, in any batch."""

from dataclasses import replace

import pytest
import torch
from training.by_hand import metrics_of_micro_batches, token_logprobs

from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import freeze, load_policy
from rlhf_pipeline.training.dpo import DPOTask

ROWS = {
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


def with_settings(task, **settings):
    return replace(task, config=CONFIG.model_copy(update=settings))


def only(*rows):
    return {name: [values[row] for row in rows] for name, values in ROWS.items()}


def rewards_by_hand(model, reference, answer):
    """Beta times the sum of the log ratios of each answer's tokens, without padding."""
    rows = list(zip(ROWS["prompt_ids"], ROWS[f"{answer}_ids"], strict=True))
    return BETA * torch.stack(
        [(token_logprobs(model, *row) - token_logprobs(reference, *row)).sum() for row in rows]
    )


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_loss_gradient_and_metrics_are_means_over_comparisons(task, model, tokens):
    """Whatever the micro batches."""
    chosen, rejected = (
        rewards_by_hand(model, task.reference, answer) for answer in ("chosen", "rejected")
    )
    margins = chosen - rejected
    expected = torch.log1p(torch.exp(-margins)).mean()
    assert task.weight(task.collate(ROWS)).item() == 3
    metrics = metrics_of_micro_batches(task, model, ROWS, tokens, expected)
    assert metrics.pop("loss") == pytest.approx(expected.item(), rel=1e-5)
    right = (margins > 0).double().mean().item()
    assert 0 < right < 1
    assert metrics == pytest.approx(
        {
            "accuracy": right, "margin": margins.mean().item(),
            "chosen_reward": chosen.mean().item(), "rejected_reward": rejected.mean().item(),
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
    smoothed = with_settings(task, label_smoothing=0.2)
    there, back, both = (
        one.loss(model, one.collate(given), torch.tensor(1.0))[0].item()
        for one, given in ((task, rows), (task, exchanged), (smoothed, rows))
    )
    assert there != pytest.approx(back, rel=1e-2)
    assert both == pytest.approx(0.8 * there + 0.2 * back, rel=1e-5)


def test_a_loss_gets_the_lengths_and_its_rewards_are_those_of_a_mean_token(task, model):
    """IPO in the middle of the rows: beta is 1/2, so the margin of mean log ratios aims at 1."""
    freeze(model)
    normalized = with_settings(task, loss="ipo")
    loss, sums = normalized.loss(model, task.collate(ROWS), torch.tensor(3.0))
    chosen, rejected = (
        rewards_by_hand(model, task.reference, answer)
        / torch.tensor(list(map(len, ROWS[f"{answer}_ids"])))
        for answer in ("chosen", "rejected")
    )
    margins = chosen - rejected
    expected = (margins / BETA - 1).square().mean()
    torch.testing.assert_close(loss.float(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(sums["margin"].float(), margins.sum(), rtol=1e-4, atol=1e-6)


def test_simpo_has_no_reference(task, model):
    """Its rewards are beta times the log-probability of a mean token."""
    freeze(model)
    simpo = replace(with_settings(task, loss="simpo"), reference=None)
    _, sums = simpo.loss(model, simpo.collate(only(0)), torch.tensor(1.0))
    expected = BETA * token_logprobs(model, ROWS["prompt_ids"][0], ROWS["chosen_ids"][0]).mean()
    torch.testing.assert_close(sums["chosen"].float(), expected, rtol=1e-4, atol=0)


def test_sft_coef_adds_the_likelihood_of_the_chosen_answers(task, model):
    freeze(model)
    both = with_settings(task, sft_coef=2.0)
    rows, one = task.collate(only(0)), torch.tensor(1.0)
    loss, sums = both.loss(model, rows, one)
    nll = -token_logprobs(model, ROWS["prompt_ids"][0], ROWS["chosen_ids"][0]).mean()
    plain, _ = task.loss(model, rows, one)
    torch.testing.assert_close(loss, plain + 2 * nll, rtol=1e-5, atol=0)
    metrics = both.metrics({name: value.item() for name, value in sums.items()})
    assert metrics["chosen_nll"] == pytest.approx(nll.item(), rel=1e-5)
