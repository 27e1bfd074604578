"""Losses beside values worked by hand. Padding is NaN, so that any leak shows."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.losses import (
    cispo_loss,
    entropy_loss,
    importance_ratios,
    kl_loss,
    pairwise_loss,
    policy_loss,
    reduced,
    sft_loss,
    value_loss,
)

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
"""Five tokens that count."""
ONE = torch.tensor([[True]])
exact = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)


def check(loss: tuple[Tensor, Tensor], parameter: Tensor, expected: float, gradient) -> None:
    total, count = loss
    assert total.dtype == torch.float32 and not count.requires_grad
    (own,) = torch.autograd.grad(total / count, parameter)
    exact((total / count).detach(), torch.tensor(expected))
    exact(own, torch.as_tensor(gradient))


# --- policy_loss, clip_range 0.2. The gradient of -ratio * A by the logprob is -ratio * A. ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "expected", "gradient"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.0, -2.0, None, 2.0, 2.0),
        (1.1, 2.0, None, -2.2, -2.2),
        (0.9, -2.0, None, 1.8, 1.8),
        (1.5, 2.0, None, -2.4, 0.0),  # min(3, 1.2 * 2): clipped, no gradient
        (1.5, -2.0, None, 3.0, 3.0),  # min(-3, -2.4): not clipped, the ratio decreases
        (0.5, 2.0, None, -1.0, -1.0),  # min(1, 0.8 * 2): not clipped, the ratio increases
        (0.5, -2.0, None, 1.6, 0.0),  # min(-1, 0.8 * -2): clipped, no gradient
        (5.0, -2.0, None, 10.0, 10.0),
        (1.25, 2.0, 0.3, -2.5, -2.5),  # within 1.3, beyond 1.2
        (1.5, 2.0, 0.3, -2.6, 0.0),  # min(3, 1.3 * 2)
        (0.7, -2.0, 0.3, 1.6, 0.0),  # the lower end is still 0.8
    ],
)
def test_policy_loss_on_both_sides_of_the_clips(ratio, advantage, high, expected, gradient):
    logprobs = torch.tensor([[-3.0 + math.log(ratio), NAN]], requires_grad=True)
    old, advantages = torch.tensor([[-3.0, NAN]]), torch.tensor([[advantage, NAN]])
    mask = torch.tensor([[True, False]])
    loss = policy_loss(logprobs, old, advantages, mask, clip_range=0.2, clip_range_high=high)
    check(loss, logprobs, expected, [[gradient, 0.0]])


def test_the_log_ratio_is_clamped():
    """e^20, where e^200 is infinite."""
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    old, advantages = torch.tensor([[-200.0]]), torch.tensor([[-1.0]])
    loss = policy_loss(logprobs, old, advantages, ONE, clip_range=0.2)
    check(loss, logprobs, 485165195.4, [[0.0]])


def test_the_ratio_of_a_sequence_is_a_geometric_mean():
    """sqrt(e^0.4 * e^0) = e^0.2 = 1.2214028, for both tokens; the third is padding.

    -1.2214028 * 2; each log-probability moves the mean by half, and both tokens have it.
    """
    logprobs = torch.tensor([[-0.6, -1.0, NAN]], requires_grad=True)
    old, advantages = torch.tensor([[-1.0, -1.0, NAN]]), torch.tensor([[2.0, 2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    ratios = importance_ratios(logprobs, old, mask, importance="sequence")
    exact(ratios.detach(), torch.tensor([[1.2214028, 1.2214028, 1.0]]))
    loss = policy_loss(logprobs, old, advantages, mask, clip_range=0.5, importance="sequence")
    check(loss, logprobs, -2.4428055, [[-1.2214028, -1.2214028, 0.0]])
    clipped = policy_loss(logprobs, old, advantages, mask, clip_range=0.1, importance="sequence")
    check(clipped, logprobs, -2.2, [[0.0, 0.0, 0.0]])


def test_the_ratio_of_a_sequence_leaves_each_token_its_own_advantage():
    """Ratio 1 and advantages 2 and 0, the second of a token that the sampler's mask leaves out."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages, mask = torch.tensor([[2.0, 0.0]]), ONE.expand(1, 2)
    loss = policy_loss(logprobs, logprobs, advantages, mask, clip_range=0.1, importance="sequence")
    check(loss, logprobs, -1.0, [[-1.0, 0.0]])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """Ratios 3 and 1, at most 2: -(2 * 2 * -1 + 1 * -1 * -2) / 2; gradients -2 * 2 / 2, 1 / 2."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(3), -2.0]])
    advantages, mask = torch.tensor([[2.0, -1.0]]), ONE.expand(1, 2)
    loss = cispo_loss(logprobs, old, advantages, mask, clip_range=0.2, clip_range_high=1.0)
    check(loss, logprobs, 1.0, [[-2.0, 0.5]])


@pytest.mark.parametrize(
    ("denominator", "total", "count"),
    [
        ("tokens", 15.0, 5),
        ("sequences", 9.5, 3),  # 3 / 2 + 4 / 1 + 8 / 2
        ("constant", 15.0, 30),  # three rows of 10 tokens
    ],
)
def test_denominators(denominator, total, count):
    """A row without a token changes neither the sum nor the count."""
    rows, mask = torch.cat([NATS, NATS[:1]]), torch.cat([MASK, ~MASK[:1] & MASK[:1]])
    found = reduced(rows, mask, denominator=denominator, max_response_tokens=10)
    assert (float(found[0]), int(found[1])) == (total, count)


@pytest.mark.parametrize("denominator", ["sequences", "constant"])
def test_every_loss_of_the_actor_has_the_denominator(denominator):
    options = {"reduce": partial(reduced, denominator=denominator, max_response_tokens=10)}
    expected = {"sequences": 3, "constant": 30}[denominator]
    losses = [
        policy_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, clip_range=0.2, **options),
        cispo_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, clip_range=0.2, **options),
        kl_loss(KL_LOGPROBS, KL_OLD, KL_REF, MASK, **options),
        entropy_loss(NATS, MASK, **options),
    ]
    assert [int(count) for _, count in losses] == [expected] * 4
    # Surrogates 3.4 / 2 + 2.2 + 1.4 / 2 and their sum, 7.
    exact(losses[0][0], torch.tensor({"sequences": -4.6, "constant": -7.0}[denominator]))


# --- value_loss, old value 1, clip_range 0.2: values are clipped to [0.8, 1.2] ---


@pytest.mark.parametrize(
    ("value", "ret", "clip_range", "expected", "gradient"),
    [
        (1.1, 2.0, 0.2, 0.405, -0.9),  # within: 0.9^2 / 2
        (1.5, 2.0, 0.2, 0.32, 0.0),  # max(0.5^2, 0.8^2) / 2: clipped, no gradient
        (1.5, 0.0, 0.2, 1.125, 1.5),  # max(1.5^2, 1.2^2) / 2: away from the return
        (0.5, 0.0, 0.2, 0.32, 0.0),  # max(0.5^2, 0.8^2) / 2: clipped, no gradient
        (0.5, 2.0, 0.2, 1.125, -1.5),  # max(1.5^2, 1.2^2) / 2
        (1.5, 2.0, None, 0.125, -0.5),  # 0.5^2 / 2
    ],
)
def test_value_loss_on_both_sides_of_the_clip(value, ret, clip_range, expected, gradient):
    values = torch.tensor([[value]], requires_grad=True)
    old, returns = torch.tensor([[1.0]]), torch.tensor([[ret]])
    check(
        value_loss(values, old, returns, ONE, clip_range=clip_range), values, expected, [[gradient]]
    )


def test_value_loss_of_bfloat16_values_is_in_float32():
    """(256 - 257)^2 / 2; bfloat16 cannot hold 257."""
    values = torch.tensor([[256.0]], dtype=torch.bfloat16)
    total, _ = value_loss(values, values, torch.tensor([[257.0]]), ONE, clip_range=None)
    exact(total, torch.tensor(0.5))


def test_only_the_trained_quantity_gets_a_gradient():
    trained, *constants = (torch.full((1, 1), x, requires_grad=True) for x in (0.1, 0.0, 1.0))
    for loss in (policy_loss, value_loss):
        loss(trained, *constants, ONE, clip_range=0.2)[0].backward()
    assert trained.grad is not None
    assert [constant.grad for constant in constants] == [None, None]


# --- all losses, in a padded batch ---

# Ratios 1.5, 0.5; 1.1; 1, 0.5. Advantages 2, 2; 2; 3, -2.
# The surrogates 2.4, 1; 2.2; 3, -1.6 sum to 7, over 5.
OLD_LOGPROBS = torch.tensor([[-1.0, -2.0, NAN], [-1.5, NAN, NAN], [-3.0, -1.0, NAN]])
LOGPROBS = OLD_LOGPROBS + torch.tensor(
    [[0.4054651, -0.6931472, NAN], [0.0953102, NAN, NAN], [0.0, -0.6931472, NAN]]
)
ADVANTAGES = torch.tensor([[2.0, 2.0, NAN], [2.0, NAN, NAN], [3.0, -2.0, NAN]])
# The rows of the table: 0.405 + 0.32 + 1.125 + 0.32 + 1.125 = 3.295, over 5.
VALUES = torch.tensor([[1.1, 1.5, NAN], [1.5, NAN, NAN], [0.5, 0.5, NAN]])
OLD_VALUES = torch.tensor([[1.0, 1.0, NAN], [1.0, NAN, NAN], [1.0, 1.0, NAN]])
RETURNS = torch.tensor([[2.0, 2.0, NAN], [0.0, NAN, NAN], [0.0, 2.0, NAN]])
# Ratios 1 and 2; 1; 1 and 1, log ratios to the reference 2, -1; 2; 0, 2:
# (4 + 2 * 1 + 4 + 0 + 4) / 2 = 7, over 5. A gradient is ratio * log ratio / 5.
KL_OLD = torch.tensor([[-1.0, -2.6931472, NAN], [-1.0, NAN, NAN], [-1.0, -1.0, NAN]])
KL_LOGPROBS = torch.tensor([[-1.0, -2.0, NAN], [-1.0, NAN, NAN], [-1.0, -1.0, NAN]])
KL_REF = torch.tensor([[-3.0, -1.0, NAN], [-3.0, NAN, NAN], [-1.0, -3.0, NAN]])
# 1 + 2 + 4 + 3 + 5 = 15 nats, over 5.
NATS = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [3.0, 5.0, NAN]])
EVEN = [[-0.2, -0.2, 0.0], [-0.2, 0.0, 0.0], [-0.2, -0.2, 0.0]]
PADDED = {
    "policy": (
        partial(policy_loss, clip_range=0.2), (LOGPROBS, OLD_LOGPROBS, ADVANTAGES),
        -1.4, [[0.0, -0.2, 0.0], [-0.44, 0.0, 0.0], [-0.6, 0.0, 0.0]],
    ),
    # Weights 1.2, 0.5; 1.1; 1, 0.5 times advantages 2, 2; 2; 3, -2 times log-probabilities
    # -0.5945349, -2.6931472; -1.4046898; -3, -1.6931472: the negative sum is 14.5172014, over 5.
    "cispo": (
        partial(cispo_loss, clip_range=0.2), (LOGPROBS, OLD_LOGPROBS, ADVANTAGES),
        2.9034403, [[-0.48, -0.2, 0.0], [-0.44, 0.0, 0.0], [-0.6, 0.2, 0.0]],
    ),
    "value": (
        partial(value_loss, clip_range=0.2), (VALUES, OLD_VALUES, RETURNS),
        0.659, [[-0.18, 0.0, 0.0], [0.3, 0.0, 0.0], [0.0, -0.3, 0.0]],
    ),
    "kl": (
        kl_loss, (KL_LOGPROBS, KL_OLD, KL_REF),
        1.4, [[0.4, -0.4, 0.0], [0.4, 0.0, 0.0], [0.0, 0.4, 0.0]],
    ),
    "entropy": (entropy_loss, (NATS,), -3.0, EVEN),
    "sft": (sft_loss, (-NATS,), 3.0, EVEN),
}  # fmt: skip


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1]], ids=["padded", "a tool in between"])
@pytest.mark.parametrize("name", PADDED)
def test_a_batch_and_its_micro_batches(name, order):
    """A loss, its gradient and its count add up over unequal parts of the batch, wherever the
    tokens stand that the policy did not choose."""
    loss, tensors, expected, gradient = PADDED[name]
    trained, *constants, mask = (x[:, order].clone() for x in (*tensors, MASK))
    trained.requires_grad_()
    gradient = torch.tensor(gradient)[:, order]
    check(loss(trained, *constants, mask), trained, expected, gradient)
    parts = [
        loss(trained[rows], *(x[rows] for x in constants), mask[rows])
        for rows in (slice(1), slice(1, 3))
    ]
    assert [int(count) for _, count in parts] == [2, 3]
    total, count = (sum(each) for each in zip(*parts, strict=True))
    check((total, count), trained, expected, gradient)


@pytest.mark.parametrize("name", PADDED)
def test_shapes_must_agree(name):
    loss, tensors, *_ = PADDED[name]
    for place in range(len(tensors)):
        wrong = [x[:, :2] if i == place else x for i, x in enumerate(tensors)]
        with pytest.raises(ValueError, match=r" is \(3, 2\), mask is \(3, 3\)"):
            loss(*wrong, MASK)


# --- Pairs: the margins are 0, ln 3 and -ln 3. ---
# -ln 1/2 = 0.6931472, -ln 3/4 = 0.2876821, -ln 1/4 = 1.3862944; sum 2.3671236, mean 0.7890412.
CHOSEN, REJECTED = torch.tensor([2.0, 1.0986123, 0.0]), torch.tensor([2.0, 0.0, 1.0986123])


def test_pairwise_loss_is_the_likelihood_of_the_preferences():
    """-(1 - sigmoid(margin)) / 3: -(1/2)/3, -(1/4)/3, -(3/4)/3; the opposite for the rejected."""
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    expected = [-0.1666667, -0.0833333, -0.25]
    check(pairwise_loss(chosen, rejected), chosen, 0.7890412, expected)
    check(pairwise_loss(chosen, rejected), rejected, 0.7890412, [-x for x in expected])
    parts = [pairwise_loss(chosen[rows], rejected[rows]) for rows in (slice(1), slice(1, 3))]
    check(tuple(sum(each) for each in zip(*parts, strict=True)), chosen, 0.7890412, expected)


def test_pairs_must_not_broadcast():
    with pytest.raises(ValueError, match=r"rejected_scores is \(3, 1\), chosen_scores is \(3,\)"):
        pairwise_loss(CHOSEN, REJECTED.unsqueeze(1))
