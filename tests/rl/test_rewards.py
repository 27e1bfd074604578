"""KL and rewards beside values worked by hand. Padding is NaN, so that a leak shows."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.rl.rewards import (
    adapted_kl_coef,
    kl_estimate,
    per_token_rewards,
    sampler_weights,
    shaped_scores,
)

NAN = float("nan")
close = torch.testing.assert_close

# --- KL ---


def test_estimates():
    """ln 1/2 against ln 1/4, and ln 1/4 against ln 1/2: x = ln 2 and -ln 2."""
    logprobs = torch.tensor([[-0.6931472, -1.3862944]])
    ref = logprobs.flip(1)
    close(kl_estimate(logprobs, ref, "k1"), torch.tensor([[0.6931472, -0.6931472]]))
    # 1/2 - 1 + ln 2, 2 - 1 - ln 2
    close(kl_estimate(logprobs, ref, "k3"), torch.tensor([[0.1931472, 0.3068528]]))
    with pytest.raises(ValueError, match=r"ref_logprobs is \(2, 1\), logprobs is \(1, 2\)"):
        kl_estimate(logprobs, ref.T, "k1")


def test_k3_keeps_its_precision_near_zero():
    """exp(-x) - 1 + x = x^2 / 2 - ... = 5e-15 at x = 1e-7; exp(-x) - 1 alone errs by 1e-16."""
    x = torch.tensor([1e-7], dtype=torch.float64)
    expected = torch.tensor([5e-15], dtype=torch.float64)
    close(kl_estimate(x, torch.zeros_like(x), "k3"), expected, rtol=1e-5, atol=0)


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
def test_the_coefficient_follows_the_error(observed_kl, expected):
    adapted = adapted_kl_coef(0.1, observed_kl, target=6.0, horizon=10_000, batch_size=500)
    assert adapted == pytest.approx(expected, rel=1e-9)


# --- rewards ---


@pytest.mark.parametrize(("penalty", "third"), [(0.0, 3.0), (1.5, 1.5)])
def test_cut_responses_lose_the_penalty(penalty, third):
    """Whatever the sign of its score, a cut response has less than the same text with an end."""
    scores, ended = torch.tensor([2.0, -10.0, 3.0]), torch.tensor([True, True, False])
    shaped = shaped_scores(scores, ended, scores, missing_eos_penalty=penalty)
    close(shaped, torch.tensor([2.0, -10.0, third]))
    with pytest.raises(ValueError, match=r"has_eos is \(2,\), scores is \(3,\)"):
        shaped_scores(scores, ended[:2], scores, missing_eos_penalty=0.0)


def test_long_responses_lose_more_towards_the_limit():
    """At most 10 tokens, a penalty of 2 over the last 4: (8 - 6) / 4 * 2, (10 - 6) / 4 * 2."""
    scores, ended = torch.ones(4), torch.tensor([True, True, True, False])
    shaped = shaped_scores(
        scores, ended, torch.tensor([5, 8, 10, 10]), missing_eos_penalty=0.5,
        overlong_penalty=2.0, overlong_buffer=4, max_response_tokens=10,
    )  # fmt: skip
    close(shaped, torch.tensor([1.0, 0.0, -1.0, -1.5]))


@pytest.mark.parametrize(
    ("level", "beyond", "expected"),
    [
        ("token", "truncate", [[2.0, 2.5], [0.5, 0.0]]),
        ("token", "mask", [[2.0, 0.0], [0.5, 0.0]]),
        ("sequence", "truncate", [[2.5, 2.5], [0.5, 0.0]]),  # 2 * 3
        ("sequence", "mask", [[0.0, 0.0], [0.5, 0.0]]),
    ],
)
def test_weights_of_another_sampler(level, beyond, expected):
    """Probabilities 2, 3 and 1/2 times those of the sampler, at most 2.5."""
    ratios = torch.tensor([[2.0, 3.0], [0.5, NAN]])
    sampler = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    weights = sampler_weights(
        sampler + ratios.log(), sampler, mask, level=level, beyond=beyond, maximum=2.5
    )
    close(weights, torch.tensor(expected))


MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, NAN], [-2.0, NAN, NAN]])
REF_LOGPROBS = torch.tensor([[-2.0, -2.0, -1.0], [-3.0, -0.5, NAN], [-2.0, NAN, NAN]])
SCORES = torch.tensor([5.0, 7.0, -1.0])
# k1 = [1, 0, -2], [2, -0.5], [0]; times -0.1; the score joins the last token.
REWARDS = torch.tensor([[-0.1, 0.0, 5.2], [-0.2, 7.05, 0.0], [-1.0, 0.0, 0.0]])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["padding behind", "before"])
def test_rewards_put_the_score_on_the_last_token_of_the_policy(order):
    """Wherever the other tokens stand; `order` keeps that of the policy's in the last two rows."""
    rows = slice(0, 3) if order[0] == 0 else slice(1, 3)
    own = [x[rows][:, order] for x in (LOGPROBS, REF_LOGPROBS, MASK)]
    rewards = per_token_rewards(SCORES[rows], *own, kl_coef=0.1)
    assert rewards.dtype == torch.float32
    close(rewards, REWARDS[rows][:, order])


def test_a_response_needs_a_token_and_one_score():
    mask = MASK.clone()
    mask[1] = False
    with pytest.raises(ValueError, match="found a row without a token of the policy"):
        per_token_rewards(SCORES, LOGPROBS, REF_LOGPROBS, mask, kl_coef=0.1)
    for shape in ((3, 1), (2,), ()):
        with pytest.raises(ValueError, match="expected one number per row"):
            per_token_rewards(torch.zeros(shape), LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"ref_logprobs is \(3, 2\), mask is \(3, 3\)"):
        per_token_rewards(SCORES, LOGPROBS, REF_LOGPROBS[:, :2], MASK, kl_coef=0.1)
