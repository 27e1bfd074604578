"""Diagnostics of PPO training, as sums that add up over micro batches and ranks.

All tensors are (B, R): B sequences, R response tokens; a mask as in `rl.masking`. All functions
raise ValueError if a shape is wrong.
"""

import torch
from torch import Tensor

from rlhf_pipeline.rl.losses import Importance, importance_ratios
from rlhf_pipeline.rl.masking import check_shapes, masked_moments, masked_sum, mean_and_variance
from rlhf_pipeline.rl.rewards import kl_estimate


@torch.no_grad()
def policy_diagnostics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    importance: Importance = "token",
) -> dict[str, Tensor]:
    """Measure how far updates have moved the policy from the one that sampled.

    All values are sums over the mask, 0-dim float64:

        approx_kl       k3 estimate of KL(old || new): ratio - 1 - log ratio
        clip_fraction   1 where the ratio of `importance` is outside the clip range
        ratio           exp(logprobs - old_logprobs); a mean near 1 means representative samples

    Source: Schulman, http://joschu.net/blog/kl-approx.html; names as in OpenAI Baselines' ppo2.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    logprobs, old_logprobs = logprobs.double(), old_logprobs.double()
    ratio = (logprobs - old_logprobs).exp()
    high = clip_range if clip_range_high is None else clip_range_high
    used = importance_ratios(logprobs, old_logprobs, mask, importance=importance)
    outside = (used - 1 > high) | (1 - used > clip_range)
    return {
        "approx_kl": masked_sum(kl_estimate(old_logprobs, logprobs, "k3"), mask),
        "clip_fraction": masked_sum(outside.double(), mask),
        "ratio": masked_sum(ratio, mask),
    }


def value_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The input of `explained_variance`, (2, 3) float64, from the values that gave the returns.

    Row 0 are `masked_moments` of the returns G, row 1 those of G - V.
    """
    check_shapes(mask, values=values, returns=returns)
    return torch.stack(
        [masked_moments(returns, mask), masked_moments(returns.double() - values.double(), mask)]
    )


def explained_variance(sums: Tensor) -> Tensor:
    """Compute the fraction of the returns' variance that the critic explains.

        1 - Var(G - V) / Var(G)     1 = perfect, 0 = like a constant, negative = worse

    The result is 0-dim float64, NaN if all returns are equal.
    """
    mean, variance = mean_and_variance(sums[0])
    _, error_variance = mean_and_variance(sums[1])
    # Rounding makes the variance of equal returns about 1e-16 of their square instead of 0.
    return torch.where(variance > 1e-12 * mean.square(), 1 - error_variance / variance, torch.nan)
