from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.rl.kl import adapted_kl_coef, kl_estimate

# ln 1/2 against ln 1/4, and ln 1/4 against ln 1/2: x = ln 2 and -ln 2.
LOGPROBS = torch.tensor([[-0.6931472, -1.3862944]])
REF_LOGPROBS = torch.tensor([[-1.3862944, -0.6931472]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [[0.6931472, -0.6931472]]),
        ("k3", [[0.1931472, 0.3068528]]),  # 1/2 - 1 + ln 2, 2 - 1 - ln 2
    ],
)
def test_estimates(estimator, expected):
    torch.testing.assert_close(
        kl_estimate(LOGPROBS, REF_LOGPROBS, estimator), torch.tensor(expected)
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    # p = [3/4, 1/4], p_ref = [1/2, 1/2]:
    # KL(p || p_ref) = 3/4 ln 3/2 + 1/4 ln 1/2 = 0.3040988 - 0.1732868
    p = torch.tensor([0.75, 0.25])
    estimate = kl_estimate(p.log(), torch.tensor([0.5, 0.5]).log(), estimator)
    torch.testing.assert_close((p * estimate).sum(), torch.tensor(0.1308120), rtol=1e-5, atol=0)


def test_k3_keeps_its_precision_near_zero():
    # exp(-x) - 1 + x = x^2 / 2 - x^3 / 6 + ... = 5e-15 at x = 1e-7;
    # exp(-x) - 1 alone has an error of 1e-16.
    x = torch.tensor([1e-7], dtype=torch.float64)
    expected = torch.tensor([5e-15], dtype=torch.float64)
    torch.testing.assert_close(
        kl_estimate(x, torch.zeros_like(x), "k3"), expected, rtol=1e-5, atol=0
    )


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator: found 'abs', expected 'k1' or 'k3'"):
        kl_estimate(LOGPROBS, REF_LOGPROBS, "abs")


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"ref_logprobs is \(2, 1\), logprobs is \(1, 2\)"):
        kl_estimate(LOGPROBS, REF_LOGPROBS.T, "k1")


@pytest.mark.parametrize(
    ("observed_kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1005),  # error 0.1: 0.1 * (1 + 0.1 * 500 / 10000)
        (5.4, 0.0995),  # error -0.1
        (60.0, 0.101),  # error 9, clipped to 0.2
        (0.0, 0.099),  # error -1, clipped to -0.2
    ],
)
def test_the_coefficient_follows_the_error(observed_kl: float, expected: float):
    adapted = adapted_kl_coef(0.1, observed_kl, target=6.0, horizon=10_000, batch_size=500)
    assert adapted == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("observed_kl", [float("nan"), float("inf")])
def test_a_diverged_kl_is_refused(observed_kl: float):
    with pytest.raises(ValueError, match=f"observed_kl: found {observed_kl}, expected a finite"):
        adapted_kl_coef(0.1, observed_kl, target=6.0, horizon=10_000, batch_size=500)


def test_the_target_must_be_positive():
    with pytest.raises(ValueError, match=r"target: found 0\.0, expected a positive"):
        adapted_kl_coef(0.1, 6.0, target=0.0, horizon=10_000, batch_size=500)


def test_the_horizon_must_not_let_the_coefficient_change_sign():
    with pytest.raises(
        ValueError, match=r"horizon: found 100, expected more than 0\.2 \* batch_size = 100"
    ):
        adapted_kl_coef(0.1, 6.0, target=6.0, horizon=100, batch_size=500)
