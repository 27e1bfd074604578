from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.rl.token_rewards import per_token_rewards, shaped_scores

NAN = float("nan")
SCORES = torch.tensor([2.0, -10.0, 3.0, 11.0])
HAS_EOS = torch.tensor([True, True, False, True])


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [(0.0, [2.0, -10.0, 3.0, 11.0]), (1.5, [2.0, -10.0, 1.5, 11.0])],
)
def test_cut_responses_lose_the_penalty(penalty, expected):
    shaped = shaped_scores(SCORES, HAS_EOS, missing_eos_penalty=penalty)
    torch.testing.assert_close(shaped, torch.tensor(expected))


@pytest.mark.parametrize("score", [-40.0, -3.0, 0.0, 7.0])
def test_a_cut_response_scores_less_than_the_same_text_with_an_end(score):
    cut, finished = shaped_scores(
        torch.tensor([score, score]), torch.tensor([False, True]), missing_eos_penalty=1.0
    )
    assert cut == finished - 1.0


def test_scores_and_endings_must_pair():
    with pytest.raises(ValueError, match=r"has_eos is \(3,\), scores is \(4,\)"):
        shaped_scores(SCORES, HAS_EOS[:3], missing_eos_penalty=0.0)


MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, NAN], [-2.0, NAN, NAN]])
REF_LOGPROBS = torch.tensor([[-2.0, -2.0, -1.0], [-3.0, -0.5, NAN], [-2.0, NAN, NAN]])
FINAL_SCORES = torch.tensor([5.0, 7.0, -1.0])
# k1 = [1, 0, -2], [2, -0.5], [0]; times -0.1; the score joins the last real token.
REWARDS = torch.tensor([[-0.1, 0.0, 5.2], [-0.2, 7.05, 0.0], [-1.0, 0.0, 0.0]])


def test_rewards_put_the_score_on_the_last_real_token():
    rewards = per_token_rewards(FINAL_SCORES, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.1)
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, REWARDS)


def test_rewards_of_a_rank_are_those_of_its_rows():
    rewards = per_token_rewards(
        FINAL_SCORES[1:], LOGPROBS[1:], REF_LOGPROBS[1:], MASK[1:], kl_coef=0.1
    )
    torch.testing.assert_close(rewards, REWARDS[1:])


def test_rewards_have_no_gradient():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not per_token_rewards(
        torch.ones(1), logprobs, torch.zeros(1, 2), mask, kl_coef=0.1
    ).requires_grad


def test_an_empty_response_is_refused():
    mask = MASK.clone()
    mask[1] = False
    with pytest.raises(ValueError, match="found a row without a real token"):
        per_token_rewards(FINAL_SCORES, LOGPROBS, REF_LOGPROBS, mask, kl_coef=0.1)


def test_left_padding_is_refused():
    with pytest.raises(ValueError, match="real token after padding"):
        per_token_rewards(FINAL_SCORES, LOGPROBS, REF_LOGPROBS, MASK.flip(1), kl_coef=0.1)


@pytest.mark.parametrize("shape", [(3, 1), (2,), ()])
def test_each_response_needs_one_score(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="expected one score per row"):
        per_token_rewards(torch.zeros(shape), LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.1)


def test_logprobs_must_have_the_shape_of_the_mask():
    with pytest.raises(ValueError, match=r"ref_logprobs is \(3, 2\), mask is \(3, 3\)"):
        per_token_rewards(FINAL_SCORES, LOGPROBS, REF_LOGPROBS[:, :2], MASK, kl_coef=0.1)
