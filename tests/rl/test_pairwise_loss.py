from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.rl.pairwise_loss import pairwise_loss

# The differences are 0, ln 3 and -ln 3.
# -ln 1/2 = 0.6931472, -ln 3/4 = 0.2876821, -ln 1/4 = 1.3862944; sum 2.3671236, mean 0.7890412.
CHOSEN = torch.tensor([2.0, 1.0986123, 0.0])
REJECTED = torch.tensor([2.0, 0.0, 1.0986123])


def test_pairwise_loss_is_the_likelihood_of_the_preferences():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    loss = pairwise_loss(chosen, rejected, normalizer=3)
    torch.testing.assert_close(loss.detach(), torch.tensor(0.7890412))
    loss.backward()
    # -(1 - sigmoid(difference)) / 3: -(1/2)/3, -(1/4)/3, -(3/4)/3; the opposite for the rejected.
    torch.testing.assert_close(
        chosen.grad, torch.tensor([-0.1666667, -0.0833333, -0.25]), rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(
        rejected.grad, torch.tensor([0.1666667, 0.0833333, 0.25]), rtol=1e-5, atol=1e-7
    )


def test_pairwise_loss_adds_up_over_ranks():
    parts = pairwise_loss(CHOSEN[:1], REJECTED[:1], normalizer=3) + pairwise_loss(
        CHOSEN[1:], REJECTED[1:], normalizer=3
    )
    torch.testing.assert_close(parts, torch.tensor(0.7890412))


def test_pairwise_loss_is_finite_for_an_extreme_mistake():
    torch.testing.assert_close(
        pairwise_loss(torch.tensor([-500.0]), torch.tensor([500.0]), normalizer=1),
        torch.tensor(1000.0),
    )


def test_pairwise_scores_must_not_broadcast():
    with pytest.raises(ValueError, match=r"rejected_scores is \(3, 1\), chosen_scores is \(3,\)"):
        pairwise_loss(CHOSEN, REJECTED.unsqueeze(1), normalizer=3)
