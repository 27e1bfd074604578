"""Advantages beside values worked by hand. Padding is NaN, so that a leak shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, lists

from rlhf_pipeline.rl.advantages import (
    gae,
    gdpo,
    group_relative,
    grpo,
    leave_one_out,
    reinforce_plus_plus,
    to_tokens,
)

NAN = float("nan")
close = torch.testing.assert_close
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])

# --- gae, gamma 1, lam 0.5 ---
# Row 0: deltas 0 + 2 - 1, 0 + 3 - 2, 10 - 3 = 1, 1, 7; A = 7, then 1 + 7/2 = 4.5,
# then 1 + 4.5/2 = 3.25.
# Row 1: deltas 0 + 2 - 1, 4 - 2 = 1, 2; A = 2, then 1 + 2/2 = 2.
# Row 2: no token.
# Row 3: as row 1, with a token of a tool in between.
GAE_REWARDS = torch.tensor([[0.0, 0.0, 10.0], [0.0, 4.0, 99.0], [NAN, NAN, NAN], [0.0, NAN, 4.0]])
VALUES = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 99.0], [NAN, NAN, NAN], [1.0, NAN, 2.0]])
GAE_MASK = torch.tensor(
    [[True, True, True], [True, True, False], [False, False, False], [True, False, True]]
)
ADVANTAGES = torch.tensor([[3.25, 4.5, 7.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 2.0]])
RETURNS = torch.tensor([[4.25, 6.5, 10.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 4.0]])


@pytest.mark.parametrize("garbage", [None, NAN, float("inf"), -1e30])
def test_advantages_and_returns_and_no_other_token_changes_them(garbage):
    given = [GAE_REWARDS, VALUES]
    if garbage is not None:
        given = [x.masked_fill(~GAE_MASK, garbage) for x in given]
    before = [x.clone() for x in given]
    advantages, returns = gae(*given, GAE_MASK, gamma=1.0, lam=0.5)
    close(advantages, ADVANTAGES)
    close(returns, RETURNS)
    close(given, before, equal_nan=True)


@pytest.mark.parametrize(
    ("rewards", "values", "settings", "advantages", "returns"),
    [
        # Deltas 0 + 4/2 - 2, 0 + 2/2 - 4, 8 - 2 = 0, -3, 6; A = 6, -3 + 6/4, 0 - 1.5/4.
        ([0, 0, 8], [2, 4, 2], {"gamma": 0.5, "lam": 0.5}, [-0.375, -1.5, 6], [1.625, 2.5, 8]),
        # Monte Carlo: the rewards still to come are 1 + 2 + 3, 2 + 3, 3.
        ([1, 2, 3], [5, -1, 4], {"gamma": 1, "lam": 1}, [1, 6, -1], [6, 5, 3]),
        # One step: the deltas are 1 - 1 - 5, 2 + 4 + 1, 3 - 4.
        ([1, 2, 3], [5, -1, 4], {"gamma": 1, "lam": 0}, [-5, 7, -1], [0, 6, 3]),
        # A critic of its own lambda, 1; the advantages stay those of 1/2.
        ([0, 0, 10], [1, 2, 3], {"gamma": 1, "lam": 0.5, "value_lam": 1}, [3.25, 4.5, 7], [10] * 3),
    ],
)
def test_gamma_discounts_and_lambda_weighs(rewards, values, settings, advantages, returns):
    given = (torch.tensor([x]).float() for x in (rewards, values))
    found = gae(*given, MASK[:1], **settings)
    close(found, tuple(torch.tensor([x]).float() for x in (advantages, returns)))


def test_reinforce_plus_plus_whitens_the_returns_of_tokens():
    """0 + (0 + 10 / 2) / 2, 0 + 10 / 2, 10; the second row has one token."""
    rewards = torch.tensor([[0.0, 0.0, 10.0], [4.0, NAN, NAN]])
    found = reinforce_plus_plus(rewards, MASK[[0, 2]], lambda x: 2 * x, gamma=0.5)
    close(found, torch.tensor([[5.0, 10.0, 20.0], [8.0, 0.0, 0.0]]))


def test_bfloat16_arguments_are_computed_in_float32_without_gradient():
    """Deltas 0 + 0.9 * 3 - 0 and 0 - 3; bfloat16 would round 2.7 to 2.703125."""
    values = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    rewards, mask = torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    assert not (advantages.requires_grad or returns.requires_grad)
    close(advantages, torch.tensor([[2.7, -3.0]]))
    close(returns, torch.tensor([[2.7, 0.0]]))


# --- without a critic: three responses to each of two prompts, one prompt per column ---

GROUPS = torch.tensor([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])


def test_leave_one_out_compares_with_the_other_responses():
    """1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2."""
    close(leave_one_out(GROUPS), torch.tensor([[-3.0, 0.0], [-1.5, 0.0], [4.5, 0.0]]))


def moments(x):
    return x.double().mean(), x.double().var()


@pytest.mark.parametrize(
    ("scale_rewards", "divisor"),
    # 1, 2, 6 have the mean 3 and the deviation sqrt(14 / 2) = 2.6457513, to which 1e-4 is added;
    # the scores 1, 2, 6, 4, 4, 4 the mean 3.5 and the deviation sqrt(15.5 / 5) = 1.7606817.
    [("group", 2.6458513), ("batch", 1.7607817), ("none", 1.0)],
)
def test_grpo_scales_scores_alone(scale_rewards, divisor):
    """The penalties 1, 0, 2 cost the first prompt's responses 0, -1, 1."""
    penalties = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    found = grpo(GROUPS, penalties, moments, scale_rewards=scale_rewards)
    expected = [[-2 / divisor, 0.0], [-1 / divisor + 1, 0.0], [3 / divisor - 1, 0.0]]
    close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_gdpo_scales_each_reward_before_the_sum():
    """The second reward is 100 times larger, differs in the other group, and counts twice.

    Its group 100, 0, -100 has the deviation 100, so 2 * 100 / 100.0001 = 1.999998. The first is
    as above. The mean of all six is 0, the variance (1.9998488 + 7.999984) / 5 = 1.9999666, so all
    are divided by 1.4142020 + 1e-4. The penalties 1, 0, 2 cost the first prompt 0, -1, 1.
    """
    parts = torch.stack([GROUPS, torch.tensor([[0.0, 100.0], [0.0, 0.0], [0.0, -100.0]])])
    penalties = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    none = torch.zeros_like(penalties)
    found = gdpo(parts, torch.tensor([1.0, 2.0]), none, penalties, moments)
    expected = [[-0.5344691, 1.4141238], [-0.2672345 + 1, 0.0], [0.8017036 - 1, -1.4141238]]
    close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_gdpo_does_not_scale_what_cut_and_long_responses_lose():
    """0.5 / (0.7071068 + 1e-4) = 0.7070068 each way, whose deviation over all four is 0.8163811.

    So +-0.7070068 / (0.8163811 + 1e-4) = +-0.8659193, less -1 and +1 of the penalty 2.
    """
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    shaping = torch.tensor([[-2.0, 0.0], [0.0, -2.0]])
    none = torch.zeros_like(rewards)
    found = gdpo(rewards[None], torch.ones(1), shaping, none, moments)
    expected = torch.tensor([[-0.1340807, 0.1340807], [0.1340807, -0.1340807]])
    close(found, expected, rtol=1e-5, atol=1e-6)
    equal = gdpo(none[None], torch.ones(1), 0.001 * shaping, none, moments)
    close(equal, 0.001 * torch.tensor([[-1.0, 1.0], [1.0, -1.0]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("returns", [torch.zeros(1, 3), torch.zeros(4)], ids=["one", "no groups"])
def test_a_group_needs_two_responses(returns):
    for function in (leave_one_out, lambda r: group_relative(r, scale=True)):
        with pytest.raises(ValueError, match=r"expected \(K, G\) with K >= 2"):
            function(returns)


def test_each_token_gets_the_advantage_of_its_response():
    mask = torch.tensor([[True, True, True], [True, False, True]])
    advantages = to_tokens(torch.tensor([2.0, -1.0]), mask)
    close(advantages, torch.tensor([[2.0, 2.0, 2.0], [-1.0, 0.0, -1.0]]))
    with pytest.raises(ValueError, match=r"advantages is \(2, 1\), mask is \(2, 3\)"):
        to_tokens(torch.zeros(2, 1), mask)


@settings(deadline=None, max_examples=50)
@given(
    score=floats(-5, 5, width=32),
    kl=lists(floats(-20, 20, width=32), min_size=2, max_size=16),
    kl_coef=floats(0, 1),
)
def test_equal_scores_teach_grpo_nothing_but_their_own_kl(score, kl, kl_coef):
    nats = torch.tensor(kl).unsqueeze(1)
    scores = torch.full_like(nats, score)
    for scale in ("group", "batch"):
        advantages = grpo(
            scores, kl_coef * nats, lambda x: torch.var_mean(x)[::-1], scale_rewards=scale
        )
        assert (advantages.abs() <= kl_coef * (nats - nats.mean()).abs() + 1e-5).all()
