"""KL divergence of the policy from its reference: estimators, and an adaptive coefficient.

Shapes: B sequences, R response tokens.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_same_shape

KLEstimator = Literal["k1", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy.

        x = log p(token) - log p_ref(token)
        k1 = x                          unbiased, high variance, may be negative
        k3 = exp(-x) - 1 + x            unbiased, low variance, never negative

    This is about values. The gradient of the KL is that of k1 as a reward, or of `kl_loss`.

    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    All are (B, R); the result is not masked. Raises ValueError if shapes differ, or the estimator
    is unknown.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k3":
            return torch.expm1(-log_ratio) + log_ratio
        case _:
            raise ValueError(f"estimator: found {estimator!r}, expected 'k1' or 'k3'")


def adapted_kl_coef(
    kl_coef: float, observed_kl: float, *, target: float, horizon: float, batch_size: int
) -> float:
    """Compute the next KL coefficient, which moves the KL towards its target.

        error   = clip(observed_kl / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + error * batch_size / horizon)

    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2; K_beta is
    batch_size / horizon, as in their code.

    Args:
        observed_kl: mean KL of the last batch, in nats per sequence.
        target: desired KL, in nats per sequence.
        horizon: sequences over which an error of 0.2 changes the coefficient by about e^0.2.
        batch_size: sequences in the last batch, over all ranks.

    Raises:
        ValueError: observed_kl is not finite, target is not positive, or horizon is so short that
            the coefficient could change its sign.
    """
    if not math.isfinite(observed_kl):
        raise ValueError(
            f"observed_kl: found {observed_kl}, expected a finite number: the policy or the "
            "reference has diverged"
        )
    if not target > 0:
        raise ValueError(f"target: found {target}, expected a positive number")
    if not horizon > 0.2 * batch_size:
        raise ValueError(
            f"horizon: found {horizon}, expected more than 0.2 * batch_size = {0.2 * batch_size}"
        )
    error = min(max(observed_kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * batch_size / horizon)
