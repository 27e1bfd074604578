"""Rewards per token from scores per response.

Shapes: B sequences, R response tokens (right-padded).
A mask is (B, R) bool, True = real token, including EOS.
"""

import torch
from torch import Tensor

from rlhf_pipeline.rl.kl import KLEstimator, kl_estimate
from rlhf_pipeline.rl.masking import check_right_padded, check_same_shape, check_shapes


@torch.no_grad()
def shaped_scores(
    scores: Tensor, has_eos: Tensor, *, clip: float | None, missing_eos_score: float | None
) -> Tensor:
    """Clip scores, and replace those of cut responses: (B,) float32, without gradient.

        clip(score, -clip, clip)     if the response ended with EOS
        missing_eos_score            if it was cut; the reward model has seen no such text

    Source: Huang et al., https://arxiv.org/abs/2403.17031 (fixed score without EOS).

    Args:
        scores: (B,), centred so that good answers score 0 on average, as in Stiennon et al.,
            https://arxiv.org/abs/2009.01325.
        has_eos: (B,) bool, True if the response ended with EOS.
        clip: limit of the score; None = no limit.
        missing_eos_score: not clipped; None = use the score.

    Raises:
        ValueError: shapes differ, or clip is not positive.
    """
    check_same_shape(scores=scores, has_eos=has_eos)
    shaped = scores.float()
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"clip: found {clip}, expected a positive number or None")
        shaped = shaped.clamp(-clip, clip)
    if missing_eos_score is not None:
        shaped = torch.where(has_eos, shaped, missing_eos_score)
    return shaped


@torch.no_grad()
def per_token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """Subtract a KL penalty at every token, and add the score at the last real token.

        r_t = -kl_coef * KL_t + [t is the last real token] * score

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 2, which uses k1.

    Args:
        scores: (B,), from `shaped_scores`.
        logprobs: (B, R), of the policy that sampled the response.
        ref_logprobs: (B, R).
        kl_coef: penalty per nat of KL.

    Returns:
        (B, R) float32, 0 in padding, without gradient.

    Raises:
        ValueError: a shape is wrong, a row has no real token, or a row is not right-padded.
    """
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    if scores.shape != mask.shape[:1]:
        raise ValueError(
            f"scores is {tuple(scores.shape)}, mask is {tuple(mask.shape)}; expected one score per "
            "row of the mask"
        )
    check_right_padded(mask)
    lengths = mask.sum(dim=1, keepdim=True)
    if (lengths == 0).any():
        raise ValueError(
            "mask: found a row without a real token, expected at least one token per response"
        )
    penalty = torch.where(mask, kl_coef * kl_estimate(logprobs, ref_logprobs, estimator), 0.0)
    is_last = torch.arange(mask.shape[1], device=mask.device) == lengths - 1
    return (torch.where(is_last, scores.unsqueeze(1), 0.0) - penalty).float()
