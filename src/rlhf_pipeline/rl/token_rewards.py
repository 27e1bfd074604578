"""Rewards per token from scores per response.

Shapes: B sequences, R response tokens (right-padded).
A mask is (B, R) bool, True = real token, including EOS.
"""

import torch
from torch import Tensor

from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rl.masking import check_right_padded, check_same_shape, check_shapes


@torch.no_grad()
def shaped_scores(scores: Tensor, has_eos: Tensor, *, missing_eos_penalty: float) -> Tensor:
    """Lower the scores of cut responses: (B,) float32, without gradient.

        score                           if the response ended with EOS
        score - missing_eos_penalty     if it was cut

    Source: `missing_eos_penalty` of TRL, https://github.com/huggingface/trl. A fixed score instead
    could be higher than that of the same text with an end.

    Scores are (B,), `has_eos` is (B,) bool. Raises ValueError if shapes differ.
    """
    check_same_shape(scores=scores, has_eos=has_eos)
    return torch.where(has_eos, scores, scores - missing_eos_penalty).float()


@torch.no_grad()
def per_token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
) -> Tensor:
    """Subtract a KL penalty at every token, and add the score at the last real token.

        r_t = -kl_coef * (logprobs_t - ref_logprobs_t) + [t is the last real token] * score

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 2. The estimator is k1, see
    `kl_estimate`.

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
    penalty = torch.where(mask, kl_coef * kl_estimate(logprobs, ref_logprobs, "k1"), 0.0)
    is_last = torch.arange(mask.shape[1], device=mask.device) == lengths - 1
    return (torch.where(is_last, scores.unsqueeze(1), 0.0) - penalty).float()
