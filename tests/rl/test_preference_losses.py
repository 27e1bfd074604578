"""Losses of comparisons and of answers beside values worked by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.losses import LossSum, pairwise_loss
from rlhf_pipeline.rl.preference_losses import (
    chosen_nll,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_ratios,
    normalized_dpo_loss,
    robust_dpo_loss,
    simpo_loss,
)

exact = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
LN3 = math.log(3)


def check(loss: LossSum, parameter: Tensor, expected: float, gradient: list) -> None:
    total, count = loss
    assert total.dtype == torch.float32 and not count.requires_grad
    (own,) = torch.autograd.grad(total / count, parameter)
    exact((total / count).detach(), torch.tensor(expected))
    exact(own, torch.tensor(gradient))


# beta is 1/2. Log ratios of the chosen answers: 1, 0, -2. Their rewards: 1/2, 0, -1.
# Log ratios of the rejected answers: 1, -2 ln 3, -2 + 2 ln 3. Rewards: 1/2, -ln 3, -1 + ln 3.
# The margins are 0, ln 3 and -ln 3; -ln 1/2 = 0.6931472, -ln 3/4 = 0.2876821, -ln 1/4 = 1.3862944.
LOGPROBS = {
    "chosen_logprobs": torch.tensor([-3.0, -2.0, -4.0]),
    "rejected_logprobs": torch.tensor([-4.0, -3.1972246, -2.8027754]),
    "ref_chosen_logprobs": torch.tensor([-4.0, -2.0, -2.0]),
    "ref_rejected_logprobs": torch.tensor([-5.0, -1.0, -3.0]),
}
CHOSEN, REJECTED = torch.tensor([1.0, 0.0, -2.0]), torch.tensor([1.0, -2 * LN3, -2 + 2 * LN3])


def test_dpo_loss_is_the_likelihood_of_the_preferences_under_the_implicit_rewards():
    """-beta * (1 - sigmoid(margin)) / 3: -(1/2)(1/2)/3, -(1/2)(1/4)/3, -(1/2)(3/4)/3."""
    inputs = {name: x.clone().requires_grad_() for name, x in LOGPROBS.items()}
    chosen_rewards, rejected_rewards = (
        0.5 * log_ratios(inputs[f"{name}_logprobs"], inputs[f"ref_{name}_logprobs"])
        for name in ("chosen", "rejected")
    )
    exact(chosen_rewards.detach(), torch.tensor([0.5, 0.0, -1.0]))
    exact(rejected_rewards.detach(), torch.tensor([0.5, -1.0986123, 0.0986123]))
    expected = torch.tensor([-0.0833333, -0.0416667, -0.125])
    total, count = dpo_loss(**inputs, beta=0.5)
    exact((total / count).detach(), torch.tensor(0.7890412))
    (total / count).backward()
    exact(inputs["chosen_logprobs"].grad, expected)
    exact(inputs["rejected_logprobs"].grad, -expected)
    assert inputs["ref_chosen_logprobs"].grad is inputs["ref_rejected_logprobs"].grad is None


def test_dpo_loss_with_label_smoothing():
    """e = 0.1, margins 0, ln 3: (0.6931472 + 0.9 * 0.2876821 + 0.1 * 1.3862944) / 2.

    -beta * (1 - e - sigmoid(margin)) / 2: -(1/2)(0.9 - 0.5)/2, -(1/2)(0.9 - 0.75)/2.
    """
    inputs = {name: x[:2].clone().requires_grad_() for name, x in LOGPROBS.items()}
    loss = dpo_loss(**inputs, beta=0.5, label_smoothing=0.1)
    check(loss, inputs["chosen_logprobs"], 0.5453453, [-0.1, -0.0375])


@pytest.mark.parametrize(
    "loss",
    [pairwise_loss, lambda a, b: dpo_loss(a, b, torch.zeros(1), torch.zeros(1), beta=1.0)],
    ids=["pairwise", "dpo"],
)
def test_an_extreme_mistake_has_a_finite_loss(loss):
    exact(loss(torch.tensor([-500.0]), torch.tensor([500.0]))[0], torch.tensor(1000.0))


# Log ratios of a mean token: 1/2 and 0; 1 and -2. The margins h are -1/2 and 2.
RATIOS, OTHERS = [1.0, 0.0], torch.tensor([1.0, -4.0])
LENGTHS = torch.tensor([2, 2]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("loss", "chosen", "rest", "settings", "expected", "gradient"),
    [
        # What wrong preferences add is subtracted: e = 0.1, margins 0, ln 3:
        # (0.8 * 0.6931472 + 0.9 * 0.2876821 - 0.1 * 1.3862944) / 0.8 / 2, gradient
        # -beta (0.9 sigmoid(-m) + 0.1 sigmoid(m)) / 0.8 / 2: -(1/4)(0.5/0.8), -(1/4)(0.3/0.8).
        (robust_dpo_loss, [1.0, 0.0], (REJECTED[:2],), {"beta": 0.5, "label_smoothing": 0.1},
         0.4217514, [-0.15625, -0.09375]),
        # 1 - 0, 0 since ln 3 > 1, 1 + ln 3; the gradient is -beta / 3 for margins below 1.
        (hinge_loss, [1.0, 0.0, -2.0], (REJECTED,), {"beta": 0.5},
         1.0328708, [-0.1666667, 0.0, -0.1666667]),
        # The minimum is at half of 1 / beta, 1: (1.5^2 + 1^2) / 2;
        # 2 (h - 1) / length / 2: 2 (-1.5)/2/2, 2 (1)/2/2.
        (ipo_loss, RATIOS, (OTHERS, *LENGTHS), {"beta": 0.5}, 1.625, [-0.75, 0.5]),
        # beta = 2 ln 3, margins -ln 3 and 4 ln 3: (ln 4 + ln 82/81) / 2;
        # -beta * sigmoid(-margin) / length / 2: -2.1972246 (3/4)/2/2, -2.1972246 (1/82)/2/2.
        (normalized_dpo_loss, RATIOS, (OTHERS, *LENGTHS), {"beta": 2 * LN3},
         0.6992823, [-0.4119796, -0.0066988]),
        # Means -1 and -3, -2 and -1; beta = gamma = ln 3: 2 ln 3 - ln 3, -ln 3 - ln 3, so
        # (ln 4/3 + ln 10) / 2; -beta sigmoid(-margin) / length / 2: -ln 3 (1/4)/4, -ln 3 (9/10)/4.
        (simpo_loss, [-2.0, -4.0], (torch.tensor([-3.0, -2.0]), *LENGTHS),
         {"beta": LN3, "target_margin": LN3}, 1.2951336, [-0.0686633, -0.2471878]),
        # Each answer has the same weight whatever its length: (2/2 + 6/4) / 2; -1 / length / 2.
        (chosen_nll, [-2.0, -6.0], (torch.tensor([2, 4]),), {}, 1.25, [-0.25, -0.125]),
    ],
    ids=["robust", "hinge", "ipo", "normalized", "simpo", "nll"],
)  # fmt: skip
def test_a_loss_of_comparisons_and_its_gradient(loss, chosen, rest, settings, expected, gradient):
    chosen = torch.tensor(chosen, requires_grad=True)
    check(loss(chosen, *rest, **settings), chosen, expected, gradient)


def test_kto_loss_values_answers_against_the_kl():
    """beta = 1, kl = 1; ln 3 above it, at it; ln 3 below it, above it.

    Good answers, weight 2: 2 (1/4), 2 (1/2). Bad ones: 1/4, 3/4. The slope of the sigmoid is 3/16,
    1/4, 3/16, 3/16, over 4.
    """
    ratios = torch.tensor([1 + LN3, 1.0, 1 - LN3, 1 + LN3], requires_grad=True)
    kl = torch.tensor(1.0, requires_grad=True)
    good = torch.tensor([True, True, False, False])
    loss = kto_loss(ratios, good, kl, beta=1.0, desirable_weight=2.0, undesirable_weight=1.0)
    check(loss, ratios, 0.625, [-0.09375, -0.125, 0.046875, 0.046875])
    again = kto_loss(ratios, good, kl, beta=1.0, desirable_weight=2.0, undesirable_weight=1.0)
    again[0].backward()
    assert kl.grad is None


def test_answers_must_not_broadcast():
    inputs = LOGPROBS | {"ref_rejected_logprobs": torch.zeros(3, 1)}
    with pytest.raises(ValueError, match=r"ref_rejected_logprobs is \(3, 1\), chosen_logprobs"):
        dpo_loss(**inputs, beta=0.5)
    with pytest.raises(ValueError, match=r"rejected is \(3, 1\), chosen is \(3,\)"):
        hinge_loss(CHOSEN, REJECTED[:, None], beta=0.5)
    with pytest.raises(ValueError, match=r"is_good is \(3, 1\), log_ratios is \(3,\)"):
        kto_loss(CHOSEN, CHOSEN[:, None] > 0, torch.tensor(0.0), beta=0.5,
                 desirable_weight=1.0, undesirable_weight=1.0)  # fmt: skip
