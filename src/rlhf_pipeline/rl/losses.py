"""The losses, each as a pair: a sum over its terms, and the number of terms, without gradient.

The caller divides the sum by the number of terms in the whole optimizer step, over all micro
batches and ranks; an engine that averages over ranks or micro batches must undo that.

Shapes: B sequences, R response tokens, N comparisons. Tensors of tokens are (B, R); only `logprobs`
and `values` have a gradient, and old ones are of the policy or the critic that sampled. A mask is
bool, True = the policy chose the token. Sums are 0-dim float32. All functions raise ValueError for
a wrong shape.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_pipeline.rl.masking import check_same_shape, check_shapes, masked_row_sums, masked_sum

LossSum = tuple[Tensor, Tensor]  # sum and number of terms
Importance = Literal["token", "sequence"]
CLAMP = 20.0  # largest log ratio of a token, up and down
Reduce = Callable[[Tensor, Tensor], LossSum]  # terms and mask, (B, R) each; see `reduced`


def sft_loss(logprobs: Tensor, mask: Tensor) -> LossSum:
    """Negative log-likelihood of demonstrated tokens or of plain text: -sum_t log p(token_t)."""
    return -masked_sum(logprobs.float(), mask), mask.sum()


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> LossSum:
    """Negative log-likelihood of the preferences under Bradley-Terry; scores are (N,).

        L = -sum_i log sigmoid(chosen_i - rejected_i)

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 1, one comparison per pair.
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    margin = chosen_scores.float() - rejected_scores.float()
    return -logsigmoid(margin).sum(), count_of(margin)


def reduced(
    terms: Tensor,
    mask: Tensor,
    *,
    denominator: Literal["tokens", "sequences", "constant"] = "tokens",
    max_response_tokens: int = 0,
) -> LossSum:
    """Sum the terms x_t of each token, and count what divides their sum.

        tokens      sum_t x_t           / number of tokens                       (DAPO)
        sequences   sum_t x_t / |row|   / number of rows                         (GRPO)
        constant    sum_t x_t           / (number of rows * max_response_tokens) (Dr. GRPO)

    A row without a token counts nowhere.

    Source: Yu et al., https://arxiv.org/abs/2503.14476, equation 8; Shao et al.,
    https://arxiv.org/abs/2402.03300, equation 3; Liu et al., https://arxiv.org/abs/2503.20783,
    section 3.1.
    """
    if denominator == "tokens":
        return masked_sum(terms, mask), mask.sum()
    rows, lengths = masked_row_sums(terms, mask), mask.sum(1)
    if denominator == "sequences":
        return (rows / lengths.clamp(min=1)).sum(), lengths.count_nonzero()
    return rows.sum(), lengths.count_nonzero() * max_response_tokens


def importance_ratios(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, importance: Importance = "token"
) -> Tensor:
    """How much likelier the policy makes what was sampled, (B, R) float32; 1 outside the mask.

        token       exp(logprobs_t - old_logprobs_t)
        sequence    exp(mean over the row of logprobs_t - old_logprobs_t), equal for its tokens

    The log ratio is clamped, so that one token cannot make a loss infinite; a clamped one has no
    gradient. With `sequence`, each ratio has the gradient of its own token alone: the sum over a
    row of equal advantages has the gradient of GSPO.

    Source of sequence: GSPO, Zheng et al., https://arxiv.org/abs/2507.18071, equation 7 and
    section 4.3 (GSPO-token).
    """
    # Mask before exp: in the backward pass, 0 * exp(garbage) would be NaN.
    log_ratio = torch.where(mask, logprobs.float() - old_logprobs.detach().float(), 0.0)
    if importance == "sequence":
        means = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = torch.where(mask, means.detach() + (log_ratio - log_ratio.detach()), 0.0)
    return log_ratio.clamp(-CLAMP, CLAMP).exp()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    importance: Importance = "token",
    reduce: Reduce = reduced,
) -> LossSum:
    """Negative clipped surrogate objective of PPO.

        clipped_t = clip(ratio_t, 1 - clip_range, 1 + clip_range_high)
        surrogate_t = min(ratio_t * A_t, clipped_t * A_t)
        L = -sum_t surrogate_t          summed by `reduce`

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; a range of its own
    upwards: DAPO, Yu et al., https://arxiv.org/abs/2503.14476, equation 10; ratios of sequences:
    GSPO. Without `clip_range_high`, `clip_range` holds upwards, too.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = importance_ratios(logprobs, old_logprobs, mask, importance=importance)
    high = clip_range if clip_range_high is None else clip_range_high
    advantages = torch.where(mask, advantages.detach().float(), 0.0)
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + high)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return reduce(-surrogate, mask)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    importance: Importance = "token",
    reduce: Reduce = reduced,
) -> LossSum:
    """CISPO: a policy gradient with clipped importance weights, in which every token takes part.

        weight_t = min(ratio_t, 1 + clip_range_high)     a constant
        L = -sum_t weight_t * A_t * logprobs_t           summed by `reduce`

    Source: MiniMax, https://arxiv.org/abs/2506.13585, equations 4 and 5, without a lower limit, as
    in their runs.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    high = clip_range if clip_range_high is None else clip_range_high
    ratio = importance_ratios(logprobs.detach(), old_logprobs, mask, importance=importance)
    weights = ratio.clamp(max=1 + high) * torch.where(mask, advantages.detach().float(), 0.0)
    terms = -weights * torch.where(mask, logprobs.float(), 0.0)
    return reduce(terms, mask)


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    reduce: Reduce = reduced,
) -> LossSum:
    """KL penalty of the policy from its reference.

        w_t = exp(logprobs_t - old_logprobs_t)     importance weight, a constant
        L = sum_t w_t * (logprobs_t - ref_logprobs_t)^2 / 2

    Its gradient estimates that of KL(policy || reference) given the tokens before, without bias;
    its value is not the KL.

    Source: Tang and Munos, https://arxiv.org/abs/2506.09477, for the square (k2); DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, for the weight.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    weights = importance_ratios(logprobs.detach(), old_logprobs, mask)
    log_ratio = torch.where(mask, logprobs.float() - ref_logprobs.detach().float(), 0.0)
    terms = weights * log_ratio.square() / 2
    return reduce(terms, mask)


def entropy_loss(entropy: Tensor, mask: Tensor, *, reduce: Reduce = reduced) -> LossSum:
    """Negative entropy of the policy in nats, -sum_t H_t: an exploration bonus.

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 9, without c_2.
    """
    return reduce(-entropy.float(), mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float | None
) -> LossSum:
    """Clipped squared error of the critic.

        clipped_t = old_t + clip(V_t - old_t, -clip_range, clip_range)
        L = sum_t max((V_t - G_t)^2, (clipped_t - G_t)^2) / 2

    Source: OpenAI Baselines' ppo2, https://github.com/openai/baselines; not in the PPO paper. The
    returns were computed from the old values. Without a range it is the plain squared error.
    """
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, old_values, returns = (
        torch.where(mask, x.float(), 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    squared_error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * squared_error.sum(), mask.sum()


def count_of(terms: Tensor) -> Tensor:
    """The number of terms as a tensor on their device."""
    return torch.full((), terms.numel(), device=terms.device)
