from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.ppo_losses import entropy_loss, kl_loss, policy_loss, value_loss

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])


def value_and_gradient(loss: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, parameter)
    return loss.detach(), gradient


# --- policy_loss, clip_range 0.2. The gradient of -ratio * A by the logprob is -ratio * A. ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # min(3, 1.2 * 2): clipped, no gradient
        (1.5, -2.0, 3.0, 3.0),  # min(-3, -2.4): not clipped, the ratio decreases
        (0.5, 2.0, -1.0, -1.0),  # min(1, 0.8 * 2): not clipped, the ratio increases
        (0.5, -2.0, 1.6, 0.0),  # min(-1, 0.8 * -2): clipped, no gradient
    ],
)
def test_policy_loss_on_both_sides_of_the_clip(ratio, advantage, expected_loss, expected_gradient):
    logprobs = torch.tensor([[-3.0 + math.log(ratio)]], requires_grad=True)
    loss, gradient = value_and_gradient(
        policy_loss(
            logprobs,
            torch.tensor([[-3.0]]),
            torch.tensor([[advantage]]),
            torch.tensor([[True]]),
            clip_range=0.2,
            normalizer=1,
        ),
        logprobs,
    )
    torch.testing.assert_close(loss, torch.tensor(expected_loss), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([[expected_gradient]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected_loss", "expected_gradient"),
    [
        (5.0, -2.0, None, 10.0, 10.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # max(min(-10, -2.4), 3 * -2): beyond dual_clip
        (2.0, -2.0, 3.0, 4.0, 4.0),  # max(-4, -6): within dual_clip
        (5.0, 2.0, 3.0, -2.4, 0.0),  # min(10, 1.2 * 2): dual_clip ignores positive advantages
    ],
)
def test_dual_clip_limits_the_loss_of_a_negative_advantage(
    ratio, advantage, dual_clip, expected_loss, expected_gradient
):
    # The second column is padding.
    logprobs = torch.tensor([[-3.0 + math.log(ratio), NAN]], requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.tensor([[-3.0, NAN]]),
        torch.tensor([[advantage, NAN]]),
        torch.tensor([[True, False]]),
        clip_range=0.2,
        normalizer=1,
        dual_clip=dual_clip,
    )
    loss, gradient = value_and_gradient(loss, logprobs)
    torch.testing.assert_close(loss, torch.tensor(expected_loss), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient, torch.tensor([[expected_gradient, 0.0]]), rtol=1e-5, atol=0
    )


def test_dual_clip_must_exceed_1():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"dual_clip: found 1\.0, expected more than 1 or None"):
        policy_loss(x, x, x, torch.tensor([[True]]), clip_range=0.2, normalizer=1, dual_clip=1.0)


# Ratios 1.5, 0.5; 1.1; 1, 0.5. Advantages 2, 2; 2; 3, -2.
# The surrogates 2.4, 1; 2.2; 3, -1.6 sum to 7.
LOG_RATIO = torch.tensor(
    [[0.4054651, -0.6931472, NAN], [0.0953102, NAN, NAN], [0.0, -0.6931472, NAN]]
)
OLD_LOGPROBS = torch.tensor([[-1.0, -2.0, NAN], [-1.5, NAN, NAN], [-3.0, -1.0, NAN]])
ADVANTAGES = torch.tensor([[2.0, 2.0, NAN], [2.0, NAN, NAN], [3.0, -2.0, NAN]])
POLICY_GRADIENT = torch.tensor([[0.0, -0.2, 0.0], [-0.44, 0.0, 0.0], [-0.6, 0.0, 0.0]])


def policy_loss_of(logprobs: Tensor, rows: slice) -> Tensor:
    return policy_loss(
        logprobs[rows],
        OLD_LOGPROBS[rows],
        ADVANTAGES[rows],
        MASK[rows],
        clip_range=0.2,
        normalizer=torch.tensor(5.0),
    )


def test_policy_loss_of_a_padded_batch():
    logprobs = (OLD_LOGPROBS + LOG_RATIO).requires_grad_()
    loss, gradient = value_and_gradient(policy_loss_of(logprobs, slice(None)), logprobs)
    torch.testing.assert_close(loss, torch.tensor(-1.4), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, POLICY_GRADIENT, rtol=1e-5, atol=1e-7)


def test_policy_loss_adds_up_over_ranks():
    logprobs = (OLD_LOGPROBS + LOG_RATIO).requires_grad_()
    parts = policy_loss_of(logprobs, slice(1)) + policy_loss_of(logprobs, slice(1, 3))
    loss, gradient = value_and_gradient(parts, logprobs)
    torch.testing.assert_close(loss, torch.tensor(-1.4), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, POLICY_GRADIENT, rtol=1e-5, atol=1e-7)


def test_policy_loss_accepts_the_current_logprobs_as_old_ones():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = policy_loss(
        logprobs, logprobs, torch.tensor([[3.0, -1.0]]), mask, clip_range=0.2, normalizer=2
    )
    loss, gradient = value_and_gradient(loss, logprobs)
    # Ratio 1: -(3 - 1) / 2, and the plain policy gradient -A / 2.
    torch.testing.assert_close(loss, torch.tensor(-1.0))
    torch.testing.assert_close(gradient, torch.tensor([[-1.5, 0.5]]))


def test_the_log_ratio_is_clamped():
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.tensor([[-200.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[True]]),
        clip_range=0.2,
        normalizer=1,
        log_ratio_clamp=2.0,
    )
    loss, gradient = value_and_gradient(loss, logprobs)
    torch.testing.assert_close(loss, torch.tensor(7.3890561))  # e^2, where e^200 is infinite
    torch.testing.assert_close(gradient, torch.zeros(1, 1))


def test_policy_loss_checks_shapes():
    with pytest.raises(ValueError, match=r"advantages is \(3, 1\), mask is \(3, 3\)"):
        policy_loss(
            OLD_LOGPROBS, OLD_LOGPROBS, ADVANTAGES[:, :1], MASK, clip_range=0.2, normalizer=5
        )


# --- value_loss, old value 1, clip_range 0.2: values are clipped to [0.8, 1.2] ---


@pytest.mark.parametrize(
    ("value", "ret", "clip_range", "expected_loss", "expected_gradient"),
    [
        (1.1, 2.0, 0.2, 0.405, -0.9),  # within: 0.9^2 / 2
        (1.5, 2.0, 0.2, 0.32, 0.0),  # max(0.5^2, 0.8^2) / 2: clipped, no gradient
        (1.5, 0.0, 0.2, 1.125, 1.5),  # max(1.5^2, 1.2^2) / 2: away from the return
        (0.5, 0.0, 0.2, 0.32, 0.0),  # max(0.5^2, 0.8^2) / 2: clipped, no gradient
        (0.5, 2.0, 0.2, 1.125, -1.5),  # max(1.5^2, 1.2^2) / 2
        (1.5, 2.0, None, 0.125, -0.5),  # 0.5^2 / 2
    ],
)
def test_value_loss_on_both_sides_of_the_clip(
    value, ret, clip_range, expected_loss, expected_gradient
):
    values = torch.tensor([[value]], requires_grad=True)
    loss, gradient = value_and_gradient(
        value_loss(
            values,
            torch.tensor([[1.0]]),
            torch.tensor([[ret]]),
            torch.tensor([[True]]),
            clip_range=clip_range,
            normalizer=1,
        ),
        values,
    )
    torch.testing.assert_close(loss, torch.tensor(expected_loss), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([[expected_gradient]]), rtol=1e-5, atol=0)


# The rows of the table: 0.405 + 0.32 + 1.125 + 0.32 + 1.125 = 3.295, over 5.
VALUES = torch.tensor([[1.1, 1.5, NAN], [1.5, NAN, NAN], [0.5, 0.5, NAN]])
OLD_VALUES = torch.tensor([[1.0, 1.0, NAN], [1.0, NAN, NAN], [1.0, 1.0, NAN]])
RETURNS = torch.tensor([[2.0, 2.0, NAN], [0.0, NAN, NAN], [0.0, 2.0, NAN]])
VALUE_GRADIENT = torch.tensor([[-0.18, 0.0, 0.0], [0.3, 0.0, 0.0], [0.0, -0.3, 0.0]])


def value_loss_of(values: Tensor, rows: slice) -> Tensor:
    return value_loss(
        values[rows], OLD_VALUES[rows], RETURNS[rows], MASK[rows], clip_range=0.2, normalizer=5
    )


def test_value_loss_of_a_padded_batch():
    values = VALUES.clone().requires_grad_()
    loss, gradient = value_and_gradient(value_loss_of(values, slice(None)), values)
    torch.testing.assert_close(loss, torch.tensor(0.659), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, VALUE_GRADIENT, rtol=1e-5, atol=1e-7)


def test_value_loss_adds_up_over_ranks():
    values = VALUES.clone().requires_grad_()
    loss, gradient = value_and_gradient(
        value_loss_of(values, slice(1)) + value_loss_of(values, slice(1, 3)), values
    )
    torch.testing.assert_close(loss, torch.tensor(0.659), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, VALUE_GRADIENT, rtol=1e-5, atol=1e-7)


def test_value_loss_accepts_the_current_values_as_old_ones():
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = value_loss(
        values, values, torch.tensor([[2.0, 0.0]]), mask, clip_range=0.2, normalizer=1
    )
    loss, gradient = value_and_gradient(loss, values)
    # (1 + 4) / 2; V - G
    torch.testing.assert_close(loss, torch.tensor(2.5))
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 2.0]]))


def test_value_loss_of_bfloat16_values_is_in_float32():
    # (256 - 257)^2 / 2; bfloat16 cannot hold 257.
    values = torch.tensor([[256.0]], dtype=torch.bfloat16)
    loss = value_loss(
        values,
        values,
        torch.tensor([[257.0]]),
        torch.tensor([[True]]),
        clip_range=None,
        normalizer=1,
    )
    torch.testing.assert_close(loss, torch.tensor(0.5))


def test_value_loss_checks_shapes():
    with pytest.raises(ValueError, match=r"returns is \(3, 2\), mask is \(3, 3\)"):
        value_loss(VALUES, OLD_VALUES, RETURNS[:, :2], MASK, clip_range=None, normalizer=5)


def test_only_the_trained_quantity_gets_a_gradient():
    trained, *constants = (torch.full((1, 1), x, requires_grad=True) for x in (0.1, 0.0, 1.0))
    for loss in (policy_loss, value_loss):
        loss(trained, *constants, torch.tensor([[True]]), clip_range=0.2, normalizer=1).backward()
    assert trained.grad is not None
    assert [constant.grad for constant in constants] == [None, None]


# --- kl_loss: over all tokens of a vocabulary, its mean gradient is that of the KL. ---


@pytest.mark.parametrize(
    "sampler", [[0.75, 0.25], [0.4, 0.6]], ids=["the policy itself", "an earlier policy"]
)
def test_the_gradient_of_the_kl_loss_is_that_of_the_kl(sampler):
    """p = [3/4, 1/4], q = [1/2, 1/2]: x = ln 3/2 and ln 1/2, KL = 0.1308120.

    The gradient of the KL by a logit is p (x - KL) = 3/4 (0.4054651 - 0.1308120), and the negative
    of it.
    """
    logits = torch.tensor([0.75, 0.25]).log().requires_grad_()
    logprobs = logits.log_softmax(0).view(2, 1)
    old, ref = torch.tensor(sampler).log().view(2, 1), torch.tensor([[0.5], [0.5]]).log()
    mask = torch.tensor([[True]])
    expected_loss = sum(
        probability * kl_loss(logprobs[row], old[row], ref[row], mask, normalizer=1)
        for row, probability in ((slice(0, 1), sampler[0]), (slice(1, 2), sampler[1]))
    )
    _, gradient = value_and_gradient(expected_loss, logits)
    expected = torch.tensor([0.2059898, -0.2059898])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_the_gradient_of_the_kl_loss_over_a_vocabulary():
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = torch.randn(3, 7, generator=generator)
    logits.requires_grad_()
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    logprobs = logits.log_softmax(0)
    _, exact = value_and_gradient(0.05 * (logprobs.exp() * (logprobs - ref)).sum(), logits)
    logprobs, mask = logits.log_softmax(0).view(7, 1, 1), torch.tensor([[True]])
    loss = sum(
        old[token].exp()
        * 0.05
        * kl_loss(logprobs[token], old.view(7, 1, 1)[token], ref.view(7, 1, 1)[token], mask,
                  normalizer=1)
        for token in range(7)
    )  # fmt: skip
    _, gradient = value_and_gradient(loss, logits)
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-6)


def test_the_kl_loss_is_a_sum_over_real_tokens():
    """Ratios 1 and 2, log ratios to the reference 2 and -1: (4 / 2 + 2 * 1 / 2) / 6."""
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    old = torch.tensor([[-1.0, -2.0 - math.log(2), NAN]])
    mask = torch.tensor([[True, True, False]])
    loss, gradient = value_and_gradient(
        kl_loss(logprobs, old, torch.tensor([[-3.0, -1.0, NAN]]), mask, normalizer=6), logprobs
    )
    torch.testing.assert_close(loss, torch.tensor(0.5))
    torch.testing.assert_close(gradient, torch.tensor([[2 / 6, -2 / 6, 0.0]]))


def test_the_kl_loss_needs_the_shape_of_the_mask():
    with pytest.raises(ValueError, match=r"ref_logprobs is \(3, 2\), mask is \(3, 3\)"):
        kl_loss(torch.zeros(3, 3), torch.zeros(3, 3), torch.zeros(3, 2), MASK, normalizer=1)


# --- entropy_loss: 5 real tokens, 1 + 2 + 4 + 3 + 5 = 15 nats ---

ENTROPY = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [3.0, 5.0, NAN]])


def test_entropy_loss_is_the_negative_mean_over_real_tokens():
    entropy = ENTROPY.clone().requires_grad_()
    loss, gradient = value_and_gradient(entropy_loss(entropy, MASK, normalizer=5), entropy)
    torch.testing.assert_close(loss, torch.tensor(-3.0))
    torch.testing.assert_close(
        gradient, torch.tensor([[-0.2, -0.2, 0.0], [-0.2, 0.0, 0.0], [-0.2, -0.2, 0.0]])
    )


def test_entropy_loss_adds_up_over_ranks():
    parts = [
        entropy_loss(ENTROPY[rows], MASK[rows], normalizer=5) for rows in (slice(2), slice(2, 3))
    ]
    # (1 + 2 + 4) / 5 and (3 + 5) / 5
    torch.testing.assert_close(torch.stack(parts), torch.tensor([-1.4, -1.6]))
