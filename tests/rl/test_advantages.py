from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.rl.advantages import gae, group_relative, leave_one_out, to_tokens

NAN = float("nan")
# gamma 1, lam 0.5.
# Row 0: deltas 0 + 2 - 1, 0 + 3 - 2, 10 - 3 = 1, 1, 7; A = 7, then 1 + 7/2 = 4.5,
# then 1 + 4.5/2 = 3.25.
# Row 1: deltas 0 + 2 - 1, 4 - 2 = 1, 2; A = 2, then 1 + 2/2 = 2.
# Row 2: no real token.
REWARDS = torch.tensor([[0.0, 0.0, 10.0], [0.0, 4.0, 99.0], [NAN, NAN, NAN]])
VALUES = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 99.0], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
ADVANTAGES = torch.tensor([[3.25, 4.5, 7.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
RETURNS = torch.tensor([[4.25, 6.5, 10.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])


def test_advantages_and_returns():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages, ADVANTAGES)
    torch.testing.assert_close(returns, RETURNS)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30])
def test_padding_changes_nothing(garbage: float):
    rewards, values = REWARDS.masked_fill(~MASK, garbage), VALUES.masked_fill(~MASK, garbage)
    advantages, returns = gae(rewards, values, MASK, gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages, ADVANTAGES)
    torch.testing.assert_close(returns, RETURNS)


def test_a_rank_gets_the_advantages_of_its_rows():
    advantages, _ = gae(REWARDS[1:], VALUES[1:], MASK[1:], gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages, ADVANTAGES[1:])


def test_gamma_discounts_the_next_value_and_the_next_advantage():
    # gamma 0.5, lam 0.5: deltas 0 + 4/2 - 2, 0 + 2/2 - 4, 8 - 2 = 0, -3, 6;
    # A = 6, -3 + 6/4 = -1.5, 0 - 1.5/4 = -0.375.
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[2.0, 4.0, 2.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.375, -1.5, 6.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.625, 2.5, 8.0]]))


def test_lam_1_is_monte_carlo_and_lam_0_one_step():
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, -1.0, 4.0]])
    # The rewards still to come: 1 + 2 + 3, 2 + 3, 3.
    torch.testing.assert_close(
        gae(rewards, values, mask, gamma=1.0, lam=1.0)[1], torch.tensor([[6.0, 5.0, 3.0]])
    )
    # The deltas: 1 - 1 - 5, 2 + 4 + 1, 3 - 4.
    torch.testing.assert_close(
        gae(rewards, values, mask, gamma=1.0, lam=0.0)[0], torch.tensor([[-5.0, 7.0, -1.0]])
    )


def test_bfloat16_arguments_are_computed_in_float32_without_gradient():
    # Deltas 0 + 0.9 * 3 - 0 and 0 - 3; bfloat16 would round 2.7 to 2.703125.
    values = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    rewards, mask = torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    assert not (advantages.requires_grad or returns.requires_grad)
    torch.testing.assert_close(advantages, torch.tensor([[2.7, -3.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.7, 0.0]]))


def test_the_arguments_are_not_modified():
    rewards, values = torch.tensor([[4.0, 99.0]]), torch.tensor([[2.0, 99.0]])
    gae(rewards, values, torch.tensor([[True, False]]), gamma=1.0, lam=0.5)
    assert rewards.tolist() == [[4.0, 99.0]]
    assert values.tolist() == [[2.0, 99.0]]


def test_a_gap_in_the_response_is_refused():
    with pytest.raises(ValueError, match="real token after padding"):
        gae(REWARDS[:1], VALUES[:1], torch.tensor([[True, False, True]]), gamma=1.0, lam=0.5)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"values is \(3, 2\), mask is \(3, 3\)"):
        gae(REWARDS, VALUES[:, :2], MASK, gamma=1.0, lam=0.5)


# --- without a critic: three responses to each of two prompts, one prompt per column ---

GROUPS = torch.tensor([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])
# 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
LEAVE_ONE_OUT = torch.tensor([[-3.0, 0.0], [-1.5, 0.0], [4.5, 0.0]])
# Mean 3; standard deviation of -2, -1, 3: sqrt(14 / 2) = 2.6457513; plus 1e-4: 2.6458513.
GROUP_RELATIVE = torch.tensor([[-0.7559003, 0.0], [-0.3779502, 0.0], [1.1338505, 0.0]])


def test_leave_one_out_compares_with_the_other_responses():
    torch.testing.assert_close(leave_one_out(GROUPS), LEAVE_ONE_OUT)


def test_group_relative_compares_with_all_responses_in_units_of_their_deviation():
    torch.testing.assert_close(
        group_relative(GROUPS, scale=True), GROUP_RELATIVE, rtol=1e-6, atol=0
    )


def test_group_relative_without_scale_is_centred():
    expected = torch.tensor([[-2.0, 0.0], [-1.0, 0.0], [3.0, 0.0]])
    torch.testing.assert_close(group_relative(GROUPS, scale=False), expected)


def test_rounding_errors_of_equal_returns_are_not_scaled_up():
    # 0.5e-7 / (7.1e-8 + 1e-4) = 0.0005; without the constant it would be 0.7.
    advantages = group_relative(torch.tensor([[0.0], [1e-7]]), scale=True)
    assert advantages.abs().max() < 1e-3


@pytest.mark.parametrize("column", [0, 1])
def test_a_rank_gets_the_advantages_of_its_prompts(column: int):
    mine = slice(column, column + 1)
    torch.testing.assert_close(leave_one_out(GROUPS[:, mine]), LEAVE_ONE_OUT[:, mine])
    torch.testing.assert_close(
        group_relative(GROUPS[:, mine], scale=True), GROUP_RELATIVE[:, mine], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "returns", [torch.zeros(1, 3), torch.zeros(4)], ids=["one response", "no groups"]
)
def test_a_group_needs_two_responses(returns):
    for function in (leave_one_out, lambda r: group_relative(r, scale=True)):
        with pytest.raises(ValueError, match=r"expected \(K, G\) with K >= 2"):
            function(returns)


def test_each_token_gets_the_advantage_of_its_response():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages = to_tokens(torch.tensor([2.0, -1.0]), mask)
    torch.testing.assert_close(advantages, torch.tensor([[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]))


def test_each_response_needs_one_advantage():
    with pytest.raises(ValueError, match=r"advantages is \(2, 1\), mask is \(2, 3\)"):
        to_tokens(torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))
