"""From scores of responses to rewards of tokens: KL, penalties, weights of another sampler.

Shapes: B sequences, R response tokens; tensors of tokens are (B, R). A mask as in `rl.advantages`.
All functions of tensors raise ValueError if a shape is wrong.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_same_shape, check_shapes

KLEstimator = Literal["k1", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy; not masked.

        x = log p(token) - log p_ref(token)
        k1 = x                          unbiased, high variance, may be negative
        k3 = exp(-x) - 1 + x            unbiased, low variance, never negative

    This is about values. The gradient of the KL is that of k1 as a reward, or of `losses.kl_loss`.

    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs
    return log_ratio if estimator == "k1" else torch.expm1(-log_ratio) + log_ratio


def adapted_kl_coef(
    kl_coef: float, observed_kl: float, *, target: float, horizon: float, batch_size: int
) -> float:
    """Compute the next KL coefficient, which moves the KL towards its target.

        error   = clip(observed_kl / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + error * batch_size / horizon)

    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2; K_beta is
    batch_size / horizon, as in their code. KLs are in nats per sequence, the mean of the last batch
    and the desired one; horizon and batch_size count sequences, over all ranks. `PPOConfig` refuses
    a horizon that is so short that the coefficient could change its sign.
    """
    error = min(max(observed_kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * batch_size / horizon)


@torch.no_grad()
def shaped_scores(
    scores: Tensor,
    has_eos: Tensor,
    lengths: Tensor,
    *,
    missing_eos_penalty: float,
    overlong_penalty: float = 0.0,
    overlong_buffer: int = 1,
    max_response_tokens: int = 0,
) -> Tensor:
    """Lower the scores of cut responses and of those near the limit: (B,) float32, no gradient.

        score                           if the response ended with EOS
        score - missing_eos_penalty     if it was cut
        - overlong_penalty * clip((length - (max_response_tokens - buffer)) / buffer, 0, 1)

    Source: `missing_eos_penalty` of TRL, https://github.com/huggingface/trl; soft overlong
    punishment of DAPO, Yu et al., https://arxiv.org/abs/2503.14476, equation 13. Scores, lengths in
    tokens, and `has_eos`, bool, are (B,).
    """
    check_same_shape(scores=scores, has_eos=has_eos, lengths=lengths)
    shaped = torch.where(has_eos, scores, scores - missing_eos_penalty)
    if overlong_penalty:
        into = (lengths - (max_response_tokens - overlong_buffer)) / overlong_buffer
        shaped = shaped - overlong_penalty * into.clamp(0, 1)
    return shaped.float()


@torch.no_grad()
def sampler_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"],
    beyond: Literal["truncate", "mask"],
    maximum: float,
) -> Tensor:
    """Importance weights of responses that another program sampled, (B, R) float32.

        w_t = p(token) / p_sampler(token)           token
        w   = product over the row of w_t           sequence, the same for all its tokens
        min(w, maximum), or 0 above it              truncate, mask

    By token, the weights ignore that a token's prefix came from the sampler, too; by sequence, they
    do not, and vary more. `logprobs` are of the policy; the result is 0 outside the mask.

    Source: truncated, Ionides 2008, https://doi.org/10.1198/106186008X320456; for RL of language
    models, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; masked, Zhao et al.,
    https://arxiv.org/abs/2510.18855, section 2.2, who mask weights below a minimum, too.
    """
    check_shapes(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    log_ratio = torch.where(mask, logprobs.double() - sampler_logprobs.double(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(mask)
    weights = log_ratio.exp()
    weights = torch.where(weights <= maximum, weights, maximum if beyond == "truncate" else 0.0)
    return torch.where(mask, weights, 0.0).float()


@torch.no_grad()
def per_token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kl_coef: float
) -> Tensor:
    """Subtract a KL penalty at every token, and add the score at the last one: (B, R) float32.

        r_t = -kl_coef * (logprobs_t - ref_logprobs_t) + [t is the last chosen token] * score

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 2; the estimator is k1.
    Scores are (B,); `logprobs` are of the policy that sampled. Rewards are 0 outside the mask,
    without gradient. Raises ValueError also if the policy chose no token of a row.
    """
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_one_a_row("scores", scores, mask)
    if not mask.any(dim=1).all():
        raise ValueError("mask: found a row without a token of the policy, expected at least one")
    penalty = torch.where(mask, kl_coef * kl_estimate(logprobs, ref_logprobs, "k1"), 0.0)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1, keepdim=True)
    return (torch.where(places == last, scores.unsqueeze(1), 0.0) - penalty).float()


def check_one_a_row(name: str, values: Tensor, mask: Tensor) -> None:
    """Refuse values that are not one number for each row of the mask."""
    if values.shape != mask.shape[:1]:
        raise ValueError(
            f"{name} is {tuple(values.shape)}, mask is {tuple(mask.shape)}; expected one number "
            "per row of the mask"
        )
