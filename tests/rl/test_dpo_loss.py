from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.dpo_loss import dpo_loss

# beta is 1/2.
# Log ratios of the chosen responses: 1, 0, -2. Their rewards: 1/2, 0, -1.
# Log ratios of the rejected responses: 1, -2 ln 3, -2 + 2 ln 3.
# Their rewards: 1/2, -ln 3, -1 + ln 3.
# The margins are 0, ln 3 and -ln 3:
# -ln 1/2 = 0.6931472, -ln 3/4 = 0.2876821, -ln 1/4 = 1.3862944; sum 2.3671236, mean 0.7890412.
LOGPROBS = {
    "chosen_logprobs": torch.tensor([-3.0, -2.0, -4.0]),
    "rejected_logprobs": torch.tensor([-4.0, -3.1972246, -2.8027754]),
    "ref_chosen_logprobs": torch.tensor([-4.0, -2.0, -2.0]),
    "ref_rejected_logprobs": torch.tensor([-5.0, -1.0, -3.0]),
}


def dpo_inputs(rows: slice = slice(None)) -> dict[str, Tensor]:
    return {name: values[rows].clone().requires_grad_() for name, values in LOGPROBS.items()}


def test_dpo_loss_is_the_likelihood_of_the_preferences_under_the_implicit_rewards():
    inputs = dpo_inputs()
    loss, chosen_rewards, rejected_rewards = dpo_loss(**inputs, beta=0.5, normalizer=3)
    torch.testing.assert_close(loss.detach(), torch.tensor(0.7890412), rtol=1e-5, atol=0)
    torch.testing.assert_close(chosen_rewards, torch.tensor([0.5, 0.0, -1.0]))
    torch.testing.assert_close(
        rejected_rewards, torch.tensor([0.5, -1.0986123, 0.0986123]), rtol=1e-5, atol=0
    )
    loss.backward()
    # -beta * (1 - sigmoid(margin)) / 3: -(1/2)(1/2)/3, -(1/2)(1/4)/3, -(1/2)(3/4)/3;
    # the opposite for the rejected responses.
    expected = torch.tensor([-0.0833333, -0.0416667, -0.125])
    torch.testing.assert_close(inputs["chosen_logprobs"].grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(inputs["rejected_logprobs"].grad, -expected, rtol=1e-5, atol=1e-7)


def test_only_the_policy_gets_a_gradient():
    inputs = dpo_inputs()
    loss, *rewards = dpo_loss(**inputs, beta=0.5, normalizer=3)
    loss.backward()
    assert (
        inputs["ref_chosen_logprobs"].grad is None and inputs["ref_rejected_logprobs"].grad is None
    )
    assert not any(reward.requires_grad for reward in rewards)


def test_dpo_loss_with_label_smoothing():
    """e = 0.1, margins 0, ln 3: (0.6931472 + 0.9 * 0.2876821 + 0.1 * 1.3862944) / 2 = 0.5453453."""
    inputs = dpo_inputs(slice(2))
    loss, *_ = dpo_loss(**inputs, beta=0.5, label_smoothing=0.1, normalizer=2)
    torch.testing.assert_close(loss.detach(), torch.tensor(0.5453453), rtol=1e-5, atol=0)
    loss.backward()
    # -beta * (1 - e - sigmoid(margin)) / 2: -(1/2)(0.9 - 0.5)/2, -(1/2)(0.9 - 0.75)/2
    torch.testing.assert_close(
        inputs["chosen_logprobs"].grad, torch.tensor([-0.1, -0.0375]), rtol=1e-5, atol=1e-7
    )


def test_smoothed_dpo_has_its_minimum_at_the_log_odds():
    """e = 0.1: log(0.9 / 0.1) = 2.1972246."""
    chosen, zero = torch.tensor([2.1972246], requires_grad=True), torch.zeros(1)
    dpo_loss(chosen, zero, zero, zero, beta=1.0, label_smoothing=0.1, normalizer=1)[0].backward()
    torch.testing.assert_close(chosen.grad, torch.zeros(1), rtol=0, atol=1e-6)


def test_dpo_loss_of_the_reference_is_log_2_with_zero_rewards():
    chosen, rejected = torch.tensor([-3.0, -70.0]), torch.tensor([-5.0, -20.0])
    loss, *rewards = dpo_loss(
        chosen, rejected, chosen, rejected, beta=0.1, label_smoothing=0.3, normalizer=2
    )
    torch.testing.assert_close(loss, torch.tensor(0.6931472))
    assert all(torch.equal(reward, torch.zeros(2)) for reward in rewards)


def test_dpo_loss_adds_up_over_ranks():
    parts = [
        dpo_loss(**dpo_inputs(rows), beta=0.5, normalizer=torch.tensor(3))[0]
        for rows in (slice(1), slice(1, 3))
    ]
    torch.testing.assert_close(sum(parts).detach(), torch.tensor(0.7890412), rtol=1e-5, atol=0)


def test_dpo_loss_is_finite_for_an_extreme_mistake():
    sure, zero = torch.tensor([-1000.0]), torch.zeros(1)
    torch.testing.assert_close(
        dpo_loss(sure, zero, zero, zero, beta=1.0, normalizer=1)[0], torch.tensor(1000.0)
    )


def test_dpo_logprobs_must_not_broadcast():
    inputs = dpo_inputs() | {"ref_rejected_logprobs": torch.zeros(3, 1)}
    with pytest.raises(
        ValueError, match=r"ref_rejected_logprobs is \(3, 1\), chosen_logprobs is \(3,\)"
    ):
        dpo_loss(**inputs, beta=0.5, normalizer=3)
