"""The losses of PPO: policy, entropy bonus and value.

Shapes: B sequences, R response tokens. A mask is bool, True = real token.

Every loss is a sum divided by `normalizer`: the number of real tokens or comparisons over all micro batches and ranks of
one optimizer step. Added up, the losses give the gradient of the mean over the whole batch, however the batch is divided.
An engine that averages over ranks or micro batches must undo that. All arithmetic is in float32.
"""

from __future__ import annotations

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
    """PPO's clipped surrogate, negated.

        ratio_t = exp(logprobs_t - old_logprobs_t)
        surrogate_t = min(ratio_t * A_t, clip(ratio_t, 1 - clip_range, 1 + clip_range) * A_t)
        surrogate_t = max(surrogate_t, dual_clip * A_t)                 where A_t < 0, if dual_clip is set
        L = -sum_t surrogate_t / normalizer

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; dual clip: Ye et al.,
    https://arxiv.org/abs/1912.09729, equation 5. Departs from it in bounding the log ratio, so that one token cannot make
    the loss infinite; beyond the bound a token has no gradient.

    Args:
        logprobs: (B, R), the only argument that gets a gradient.
        old_logprobs: (B, R), of the policy that sampled; may be `logprobs` itself on the first step of a rollout.
        advantages: (B, R).
        mask: (B, R) bool.
        normalizer: real tokens.
        dual_clip: ratio from which on a bad token is pulled back no further, > 1; None = off.
        log_ratio_clamp: bound on |logprobs - old_logprobs|.

    Returns:
        0-dim float32.

    Raises:
        ValueError: a shape is wrong, or dual_clip is not above 1.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None for off")
    # Masked before exp: in the backward pass 0 times the exp of garbage would be NaN.
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


def entropy_loss(entropy: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Mean entropy of the policy, negated: a bonus for staying undecided.

        L = -sum_t H_t / normalizer

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 9, whose c_2 is the caller's weight.

    Args:
        entropy: (B, R), in nats.
        mask: (B, R) bool.
        normalizer: real tokens.

    Returns:
        0-dim float32.

    Raises:
        ValueError: a shape is wrong.
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
    """Squared error of the critic, pessimistic about steps longer than the clip.

        clipped_t = old_t + clip(V_t - old_t, -clip_range, clip_range)
        L = sum_t max((V_t - G_t)^2, (clipped_t - G_t)^2) / 2 / normalizer

    Source: OpenAI Baselines' ppo2, https://github.com/openai/baselines; not in the PPO paper.

    Args:
        values: (B, R), the only argument that gets a gradient.
        old_values: (B, R), of the critic that gave the returns.
        returns: (B, R).
        mask: (B, R) bool.
        clip_range: in units of the value; None = plain squared error.
        normalizer: real tokens.

    Returns:
        0-dim float32.

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
