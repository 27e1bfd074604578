from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_pipeline.rl.diagnostics import explained_variance, policy_diagnostics, value_sums

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, False]])

# Ratios 1.5, 1.1; 0.5, 0.9.
OLD_LOGPROBS = torch.tensor([[-1.0, -2.0, NAN], [-3.0, -1.0, NAN]])
LOGPROBS = OLD_LOGPROBS + torch.tensor(
    [[0.40546511, 0.09531018, NAN], [-0.69314718, -0.10536052, NAN]]
)
EXPECTED = {
    # ratio - 1 - ln ratio: 0.0945349 + 0.0046898 + 0.1931472 + 0.0053605
    "approx_kl": 0.2977324,
    "clip_fraction": 2.0,  # 1.5 and 0.5
    "ratio": 4.0,
}


def as_floats(diagnostics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(total) for name, total in diagnostics.items()}


def test_policy_diagnostics_are_sums_over_real_tokens_which_add_up_over_ranks():
    diagnostics = policy_diagnostics(LOGPROBS, OLD_LOGPROBS, MASK, clip_range=0.2)
    assert all(total.dtype == torch.float64 and total.shape == () for total in diagnostics.values())
    assert as_floats(diagnostics) == pytest.approx(EXPECTED, rel=1e-5)
    ranks = [
        policy_diagnostics(LOGPROBS[i], OLD_LOGPROBS[i], MASK[i], clip_range=0.2) for i in range(2)
    ]
    assert as_floats({name: ranks[0][name] + ranks[1][name] for name in EXPECTED}) == pytest.approx(
        EXPECTED, rel=1e-5
    )


# Returns 1, 2, 3, 6: sum 12, squares 50, variance 50/4 - 9 = 3.5.
# Errors 0, 0, 0, 2: sum 2, squares 4, variance 4/4 - 1/4 = 0.75.
RETURNS = torch.tensor([[1.0, 2.0, NAN], [3.0, 6.0, NAN]])
VALUES = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, NAN]])
SUMS = torch.tensor([[4.0, 12.0, 50.0], [4.0, 2.0, 4.0]], dtype=torch.float64)


def test_value_sums_add_up_over_ranks():
    torch.testing.assert_close(value_sums(VALUES, RETURNS, MASK), SUMS)
    first, second = (value_sums(VALUES[i], RETURNS[i], MASK[i]) for i in range(2))
    torch.testing.assert_close(first + second, SUMS)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RETURNS, 1.0),
        (RETURNS + 5, 1.0),  # a constant error has no variance
        (torch.zeros(2, 3), 0.0),
        (-RETURNS, -3.0),  # errors twice the returns: 1 - 4
    ],
    ids=["perfect", "shifted", "constant", "opposite"],
)
def test_explained_variance_of_simple_critics(values: Tensor, expected: float):
    assert float(explained_variance(value_sums(values, RETURNS, MASK))) == pytest.approx(
        expected, abs=1e-9
    )


def test_equal_returns_and_no_returns_give_nan():
    # 99 times 0.7: the computed variance is 5.6e-17.
    returns, mask = torch.full((1, 99), 0.7), torch.ones(1, 99, dtype=torch.bool)
    values = torch.arange(99.0).unsqueeze(0)
    assert explained_variance(value_sums(values, returns, mask)).isnan()
    assert explained_variance(torch.zeros(2, 3, dtype=torch.float64)).isnan()
