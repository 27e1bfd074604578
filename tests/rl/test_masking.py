"""Real tokens are small integers; padding is NaN, so that any leak shows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rlhf_pipeline.rl.masking import (
    check_same_shape,
    check_shapes,
    masked_moments,
    masked_row_sums,
    masked_sum,
    mean_and_variance,
    whiten,
)

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, NAN], [3.0, NAN, NAN], [6.0, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False], [True, False, False]])
NOTHING = torch.zeros_like(MASK)

# Of 1, 2, 3, 6: count 4, sum 12, sum of squares 1 + 4 + 9 + 36 = 50.
MOMENTS = torch.tensor([4.0, 12.0, 50.0], dtype=torch.float64)
# Mean 3, population variance 50/4 - 9 = 3.5, root 1.8708287: -2, -1, 0 and 3 over that.
WHITENED = torch.tensor([[-1.0690450, -0.5345225, 0.0], [0.0, 0.0, 0.0], [1.6035675, 0.0, 0.0]])


def test_row_sums_are_over_each_row_s_real_tokens():
    torch.testing.assert_close(masked_row_sums(X, MASK), torch.tensor([3.0, 3.0, 6.0]))
    assert torch.equal(masked_row_sums(X, NOTHING), torch.zeros(3))


def test_a_sum_and_its_gradient_are_over_the_mask():
    x = X.clone().requires_grad_()
    total = masked_sum(x, MASK)
    total.backward()
    assert total == 12.0 and masked_sum(X, NOTHING) == 0
    torch.testing.assert_close(x.grad, MASK.float())


def test_moments_are_count_sum_and_sum_of_squares_which_add_up_over_ranks():
    torch.testing.assert_close(masked_moments(X, MASK), MOMENTS)
    first, second = (masked_moments(X[rows], MASK[rows]) for rows in (slice(1), slice(1, 3)))
    torch.testing.assert_close(first + second, MOMENTS)


def test_mean_and_variance():
    mean, variance = mean_and_variance(MOMENTS)
    torch.testing.assert_close(mean, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(variance, torch.tensor(3.5, dtype=torch.float64))
    assert mean_and_variance(torch.zeros(3, dtype=torch.float64)) == (0.0, 0.0)
    # Count 4, sum of squares about the mean 14.
    _, unbiased = mean_and_variance(MOMENTS, correction=1)
    torch.testing.assert_close(unbiased, torch.tensor(14 / 3, dtype=torch.float64))
    one = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)
    assert mean_and_variance(one, correction=1) == (3.0, 0.0)


def test_whitened_batch():
    whitened = whiten(X, MASK, MOMENTS)
    assert whitened.dtype == torch.float32
    torch.testing.assert_close(whitened, WHITENED, rtol=1e-6, atol=1e-7)
    own = whiten(X[:1], MASK[:1], MOMENTS)  # a rank, by the moments of all ranks
    torch.testing.assert_close(own, WHITENED[:1], rtol=1e-6, atol=1e-7)


def test_whiten_may_keep_the_mean():
    # Mean 4, variance 4: -1 and 1, plus 4. The second row belongs to another rank.
    x, mask = torch.tensor([[2.0, NAN], [6.0, 99.0]]), torch.tensor([[True, False]] * 2)
    moments, expected = masked_moments(x, mask), torch.tensor([[3.0, 0.0], [5.0, 0.0]])
    torch.testing.assert_close(whiten(x, mask, moments, shift_mean=False), expected)
    torch.testing.assert_close(whiten(x[:1], mask[:1], moments, shift_mean=False), expected[:1])


def test_whiten_is_exact_for_a_mean_far_from_zero():
    # Mean 10000.5, variance 0.25: +-0.5 / 0.5.
    # float32 would round the squares, about 1e8, to multiples of 8.
    x, mask = torch.tensor([[10000.0, 10001.0]]), torch.tensor([[True, True]])
    found = whiten(x, mask, masked_moments(x, mask))
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0]]))


@pytest.mark.parametrize("real", [0, 1, 3], ids=["no token", "one token", "equal tokens"])
def test_whiten_returns_zero_without_variance(real: int):
    x, mask = torch.full((1, 3), 0.1), torch.arange(3).unsqueeze(0) < real
    found = whiten(x, mask, masked_moments(x, mask))
    torch.testing.assert_close(found, torch.zeros(1, 3), rtol=0, atol=1e-6)


def test_shapes_that_differ_or_would_broadcast_and_a_mask_of_numbers_are_refused():
    with pytest.raises(ValueError, match=r"values is \(3, 4\), mask is \(3, 3\)"):
        check_shapes(MASK, rewards=X, values=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"rejected is \(4, 1\), chosen is \(4,\)"):
        check_same_shape(chosen=torch.zeros(4), rejected=torch.zeros(4, 1))
    with pytest.raises(ValueError, match=r"mask: found torch\.int64, expected torch\.bool"):
        check_shapes(MASK.long(), x=X)


@pytest.mark.parametrize(
    "function", [masked_sum, masked_row_sums, masked_moments, partial(whiten, moments=MOMENTS)]
)
def test_reductions_check_shapes(function):
    with pytest.raises(ValueError, match=r"x is \(3, 2\)"):
        function(X[:, :2], MASK)
