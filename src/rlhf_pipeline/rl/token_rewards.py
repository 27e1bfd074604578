"""From one score a sequence to one reward a token.

Shapes: B sequences, R response tokens (right-padded). A mask is bool, True = real token, EOS included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_pipeline.rl.kl import KLEstimator, kl_estimate
from rlhf_pipeline.rl.masking import check_right_padded, check_same_shape, check_shapes


@torch.no_grad()
def shaped_scores(
    scores: Tensor,
    has_eos: Tensor,
    *,
    mean: float,
    clip: float | None,
    missing_eos_score: float | None,
) -> Tensor:
    """Scores as PPO sees them.

        clip(score - mean, -clip, clip)     where the response ended
        missing_eos_score                   where it was cut: the reward model never saw such texts

    Source: Stiennon et al., https://arxiv.org/abs/2009.01325 (demonstrations score 0 on average); Huang et al.,
    https://arxiv.org/abs/2403.17031 (a fixed score without EOS).

    Args:
        scores: (B,), the reward model's.
        has_eos: (B,) bool, the response ended by itself.
        mean: the reward model's mean score on demonstrations; 0 leaves scores where they are.
        clip: bound on the centred score; None = off.
        missing_eos_score: neither centred nor clipped; None = off.

    Returns:
        (B,) float32, no gradient.

    Raises:
        ValueError: shapes differ, or clip is not positive.
    """
    check_same_shape(scores=scores, has_eos=has_eos)
    shaped = scores.float() - mean
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"clip is {clip}; it must be positive, or None for off")
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
    """A KL penalty for every token, and the score on the last real one.

        r_t = -kl_coef * KL_t + [t is the last real token] * score

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 2, whose log ratio summed over a response is k1.

    Args:
        scores: (B,), shaped.
        logprobs: (B, R), of the policy that sampled the response.
        ref_logprobs: (B, R).
        mask: (B, R) bool.
        kl_coef: reward lost for each nat of KL.
        estimator: see `kl_estimate`.

    Returns:
        (B, R) float32, 0 in padding, no gradient.

    Raises:
        ValueError: a shape is wrong, a row has no real token, or a row is not right-padded.
    """
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    if scores.shape != mask.shape[:1]:
        raise ValueError(
            f"scores is {tuple(scores.shape)}, mask is {tuple(mask.shape)}; scores must have one entry a row"
        )
    check_right_padded(mask)
    lengths = mask.sum(dim=1, keepdim=True)
    if (lengths == 0).any():
        raise ValueError(
            "mask has a row without a real token; an empty response has no token to reward"
        )
    penalty = torch.where(mask, kl_coef * kl_estimate(logprobs, ref_logprobs, estimator), 0.0)
    is_last = torch.arange(mask.shape[1], device=mask.device) == lengths - 1
    return (torch.where(is_last, scores.unsqueeze(1), 0.0) - penalty).float()
