"""Losses of PPO: policy, KL penalty, entropy bonus and value.

Shapes: B sequences, R response tokens. A mask is (B, R) bool, True = real token.

A loss is a float32 sum divided by `normalizer`, the number of real tokens in one optimizer step
over all ranks and micro batches. Losses therefore add up to the mean over the whole batch; an
engine that averages over ranks or micro batches must undo that.
"""

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_shapes, masked_sum


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    normalizer: float | Tensor,
    dual_clip: float | None = None,
    log_ratio_clamp: float = 20.0,
) -> Tensor:
    """Negative clipped surrogate objective of PPO.

        ratio_t = exp(logprobs_t - old_logprobs_t)
        surrogate_t = min(ratio_t * A_t, clip(ratio_t, 1 - clip_range, 1 + clip_range) * A_t)
        surrogate_t = max(surrogate_t, dual_clip * A_t)     where A_t < 0, if dual_clip is set
        L = -sum_t surrogate_t / normalizer

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; dual clip: Ye et al.,
    https://arxiv.org/abs/1912.09729, equation 5. In addition, the log ratio is clamped, so that one
    token cannot make the loss infinite; a clamped token has no gradient.

    Args:
        logprobs: (B, R), the only argument with a gradient.
        old_logprobs: (B, R), of the policy that sampled; may be `logprobs` itself.
        advantages: (B, R).
        clip_range: allowed deviation of the ratio from 1.
        dual_clip: largest ratio that counts for a negative advantage, > 1; None = no limit.
        log_ratio_clamp: limit of |logprobs - old_logprobs|.

    Raises:
        ValueError: a shape is wrong, or dual_clip is not above 1.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip: found {dual_clip}, expected more than 1 or None")
    # Mask before exp: in the backward pass, 0 * exp(garbage) would be NaN.
    log_ratio = torch.where(mask, logprobs.float() - old_logprobs.detach().float(), 0.0)
    ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)
    advantages = torch.where(mask, advantages.detach().float(), 0.0)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is not None:
        surrogate = torch.where(
            advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate
        )
    return -surrogate.sum() / normalizer


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    normalizer: float | Tensor,
    log_ratio_clamp: float = 20.0,
) -> Tensor:
    """KL penalty of the policy from its reference.

        w_t = exp(logprobs_t - old_logprobs_t)     importance weight, a constant
        L = sum_t w_t * (logprobs_t - ref_logprobs_t)^2 / 2 / normalizer

    Its gradient estimates that of KL(policy || reference) given the tokens before, without bias, as
    the weight corrects for an earlier policy. Its value is not the KL.

    Source: Tang and Munos, https://arxiv.org/abs/2506.09477, for the square (k2); DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, for the weight. Arguments as in `policy_loss`. Raises
    ValueError if a shape is wrong.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    moved = torch.where(mask, logprobs.detach().float() - old_logprobs.detach().float(), 0.0)
    weights = moved.clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    log_ratio = torch.where(mask, logprobs.float() - ref_logprobs.detach().float(), 0.0)
    return (weights * log_ratio.square() / 2).sum() / normalizer


def entropy_loss(entropy: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Negative mean entropy of the policy: an exploration bonus.

        L = -sum_t H_t / normalizer

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 9; the caller applies the
    coefficient c_2.

    The entropy is (B, R), in nats. Raises ValueError if a shape is wrong.
    """
    return -masked_sum(entropy.float(), mask) / normalizer


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None,
    normalizer: float | Tensor,
) -> Tensor:
    """Clipped squared error of the critic.

        clipped_t = old_t + clip(V_t - old_t, -clip_range, clip_range)
        L = sum_t max((V_t - G_t)^2, (clipped_t - G_t)^2) / 2 / normalizer

    Source: OpenAI Baselines' ppo2, https://github.com/openai/baselines; not in the PPO paper.

    Args:
        values: (B, R), the only argument with a gradient.
        old_values: (B, R), the values that the returns were computed from.
        returns: (B, R).
        clip_range: allowed change of a value; None = plain squared error.

    Raises:
        ValueError: a shape is wrong.
    """
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, old_values, returns = (
        torch.where(mask, x.float(), 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    squared_error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * squared_error.sum() / normalizer
