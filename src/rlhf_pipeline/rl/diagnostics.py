"""What to watch while PPO trains, as sums that add up over micro batches and ranks.

Shapes: B sequences, R response tokens. A mask is bool, True = real token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_pipeline.rl.kl import kl_estimate
from rlhf_pipeline.rl.masking import check_shapes, masked_moments, masked_sum, mean_and_variance


@torch.no_grad()
def policy_diagnostics(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, clip_range: float
) -> dict[str, Tensor]:
    """How far the update has moved the policy from the one that sampled.

    Sums over real tokens; divide by `tokens`, once all are added, for means:

        tokens          real tokens
        approx_kl       k3 estimate of KL(old || new) = ratio - 1 - log ratio
        clip_fraction   1 where |ratio - 1| > clip_range, whatever the sign of the advantage
        ratio           exp(logprobs - old_logprobs); its mean is near 1 while the samples still represent the policy

    Source: Schulman, http://joschu.net/blog/kl-approx.html; the names are those of OpenAI Baselines' ppo2.

    Args:
        logprobs: (B, R), of the policy being updated.
        old_logprobs: (B, R), of the policy that sampled.
        mask: (B, R) bool.

    Returns:
        0-dim float64 tensors.

    Raises:
        ValueError: a shape is wrong.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    logprobs, old_logprobs = logprobs.double(), old_logprobs.double()
    ratio = (logprobs - old_logprobs).exp()
    return {
        "tokens": mask.sum().double(),
        "approx_kl": masked_sum(kl_estimate(old_logprobs, logprobs, "k3"), mask),
        "clip_fraction": masked_sum(((ratio - 1).abs() > clip_range).double(), mask),
        "ratio": masked_sum(ratio, mask),
    }


def value_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """What `explained_variance` needs: `masked_moments` of the returns and of the critic's errors, additive.

    Args:
        values: (B, R), as they were when the returns were made.
        returns: (B, R).
        mask: (B, R) bool.

    Returns:
        (2, 3) float64: row 0 of G, row 1 of G - V.

    Raises:
        ValueError: a shape is wrong.
    """
    check_shapes(mask, values=values, returns=returns)
    return torch.stack(
        [masked_moments(returns, mask), masked_moments(returns.double() - values.double(), mask)]
    )


def explained_variance(sums: Tensor) -> Tensor:
    """Share of the returns' variance that the critic predicts.

        1 - Var(G - V) / Var(G)         1 = perfect, 0 = no better than a constant, negative = worse

    Args:
        sums: (2, 3) float64, `value_sums` added over micro batches and ranks.

    Returns:
        0-dim float64; NaN where the returns are all equal and there is nothing to explain.
    """
    mean, variance = mean_and_variance(sums[0])
    _, error_variance = mean_and_variance(sums[1])
    # Equal returns leave rounding, about 1e-16 of their square, and not exactly 0.
    return torch.where(variance > 1e-12 * mean.square(), 1 - error_variance / variance, torch.nan)
