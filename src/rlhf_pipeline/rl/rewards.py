"""From scores of responses to advantages of tokens: KL penalty, rewards, advantages.

Shapes: B sequences, R response tokens, G prompts with K responses each. A mask is (B, R) bool,
True = the policy chose the token. Tokens that it did not choose, padding or a turn of a tool, may
stand anywhere: they get 0, and a step leads from one chosen token to the next.

All functions raise ValueError if a shape is wrong.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_same_shape, check_shapes

KLEstimator = Literal["k1", "k3"]
Aggregate = Literal["sum", "min", "mean_minus_std"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy.

        x = log p(token) - log p_ref(token)
        k1 = x                          unbiased, high variance, may be negative
        k3 = exp(-x) - 1 + x            unbiased, low variance, never negative

    This is about values. The gradient of the KL is that of k1 as a reward, or of `losses.kl_loss`.

    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    All are (B, R); the result is not masked.
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


@torch.no_grad()
def aggregated(parts: Tensor, how: Aggregate) -> Tensor:
    """One score from several sources, (S, B) to (B,), each already weighted.

        sum               sum_s r_s
        min               min_s r_s                    the most careful one
        mean_minus_std    mean_s r_s - std_s r_s       std divides by S

    The last two make it harder to win by the error of one reward model.

    Source: Coste et al., https://arxiv.org/abs/2310.02743, section 3: worst case, and uncertainty
    weighted with the standard deviation in place of the variance, which has the unit of a score.
    """
    if how == "sum":
        return parts.sum(0)
    return parts.amin(0) if how == "min" else parts.mean(0) - parts.std(0, correction=0)


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
    punishment of DAPO, Yu et al., https://arxiv.org/abs/2503.14476, equation 13. A fixed score
    instead could be higher than that of the same text with an end.

    Scores and lengths, in tokens, are (B,); `has_eos` is (B,) bool.
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

    Advantages times these weights make the expected update that of responses of the policy itself,
    apart from what truncation leaves out. By token, the weights ignore that a token's prefix came
    from the sampler, too; by sequence, they do not, and vary more.

    Source: truncated, Ionides 2008, https://doi.org/10.1198/106186008X320456; for RL of language
    models, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; masked, Zhao et al.,
    https://arxiv.org/abs/2510.18855, section 2.2.

    `logprobs` are those of the policy as the trainer computes them, (B, R); the result is 0 outside
    the mask.
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
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
) -> Tensor:
    """Subtract a KL penalty at every token, and add the score at the last one.

        r_t = -kl_coef * (logprobs_t - ref_logprobs_t) + [t is the last chosen token] * score

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 2. The estimator is k1, see
    `kl_estimate`.

    Args:
        scores: (B,), from `shaped_scores`.
        logprobs: (B, R), of the policy that sampled the response.
        ref_logprobs: (B, R).
        kl_coef: penalty per nat of KL.

    Returns:
        (B, R) float32, 0 outside the mask, without gradient.

    Raises:
        ValueError: a shape is wrong, or the policy chose no token of a row.
    """
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    _check_one_a_row("scores", scores, mask)
    if not mask.any(dim=1).all():
        raise ValueError("mask: found a row without a token of the policy, expected at least one")
    penalty = torch.where(mask, kl_coef * kl_estimate(logprobs, ref_logprobs, "k1"), 0.0)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1, keepdim=True)
    return (torch.where(places == last, scores.unsqueeze(1), 0.0) - penalty).float()


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    value_lam: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over whole responses.

        delta_t = r_t + gamma * V_{t+1} - V_t     t + 1: the next token that the policy chose;
        A_t     = delta_t + gamma * lam * A_{t+1}     V and A are 0 after the last one
        G_t     = A_t + V_t                       with value_lam in place of lam, if it is set

    Source: Schulman et al., https://arxiv.org/abs/1506.02438, equation 16; G_t is the TD(lambda)
    return. A lambda of its own for the critic: VAPO, Yue et al., https://arxiv.org/abs/2504.05118,
    section 4.1.

    Args:
        rewards: (B, R), including the score.
        values: (B, R), value of the state before each response token.
        gamma: discount, 1.0 in RLHF.
        lam: 0 = one-step TD, 1 = Monte Carlo.
        value_lam: the same for the returns; None: `lam`.

    Returns:
        advantages, returns: (B, R) float32 each, not whitened, 0 outside the mask, without
        gradient.
    """
    check_shapes(mask, rewards=rewards, values=values)
    rewards = torch.where(mask, rewards, 0.0).float()
    values = torch.where(mask, values, 0.0).float()
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    backwards = []
    columns = (x.unbind(1)[::-1] for x in (rewards, values, mask))
    for reward, value, chosen in zip(*columns, strict=True):
        delta = reward + gamma * next_value - value
        advantage = torch.where(chosen, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(chosen, value, next_value)
        backwards.append(advantage)
    advantages = torch.where(mask, torch.stack(backwards[::-1], dim=1), 0.0)
    if value_lam is None or value_lam == lam:
        return advantages, advantages + values
    return advantages, gae(rewards, values, mask, gamma=gamma, lam=value_lam)[1]


@torch.no_grad()
def leave_one_out(returns: Tensor) -> Tensor:
    """RLOO: compare each response with the mean of the other responses to its prompt.

        A_i = R_i - sum_{j != i} R_j / (K - 1)

    Source: Ahmadian et al., https://arxiv.org/abs/2402.14740, equation 8; R includes the KL
    penalty. Returns are (K, G), one prompt per column; so are the advantages, float32 without
    gradient. Raises ValueError for K < 2.
    """
    _check_groups(returns)
    others = returns.shape[0] - 1
    return returns.float() - (returns.sum(dim=0) - returns).float() / others


@torch.no_grad()
def group_relative(returns: Tensor, *, scale: bool) -> Tensor:
    """GRPO: center and scale each response's return by all responses to its prompt.

        A_i = (R_i - mean(R)) / (std(R) + 1e-4)     with `scale`; std divides by K - 1
        A_i = R_i - mean(R)                         without `scale`

    With `scale`, R must not contain a KL penalty: its noise would scale groups of equal scores.

    Source: Shao et al., https://arxiv.org/abs/2402.03300, section 4.1.2; without scale: Liu et al.,
    https://arxiv.org/abs/2503.20783. The divisor K - 1 and the constant are those of TRL; the paper
    does not specify them. The constant and float64 keep rounding errors of equal returns small.
    Shapes as in `leave_one_out`.
    """
    _check_groups(returns)
    returns = returns.double()
    centred = returns - returns.mean(dim=0)
    return (centred / (returns.std(dim=0) + 1e-4) if scale else centred).float()


def grpo(scores: Tensor, penalties: Tensor, *, scale_by_group_std: bool) -> Tensor:
    """GRPO with a KL penalty beside the score; all are (K, G), like `group_relative`.

    Only scores are scaled; otherwise a group of equal scores would learn from the penalty in full,
    however small its coefficient is.
    """
    relative = group_relative(scores, scale=scale_by_group_std)
    return relative - group_relative(penalties, scale=False)


@torch.no_grad()
def gdpo(
    parts: Tensor,
    weights: Tensor,
    penalties: Tensor,
    moments: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """GDPO: scale each reward within its group before the sum, and the sum over the step.

        S_i = sum_s w_s * (R_si - mean(R_s)) / (std(R_s) + 1e-4)
        A_i = (S_i - mean(S)) / (std(S) + 1e-4) - (penalty_i - mean(penalty))

    A reward of large numbers then does not hide a small one, and groups that differ in one reward
    only still learn from it.

    Source: Liu et al., https://arxiv.org/abs/2601.05242, equations 4 to 6.

    Parts are (S, K, G), weights (S,), penalties (K, G); `moments` as in `reinforce`.
    """
    scaled = torch.stack([group_relative(part, scale=True) for part in parts])
    total = (weights.view(-1, 1, 1) * scaled).sum(0)
    mean, variance = moments(total)
    normalized = (total - mean.float()) / (variance.float().sqrt() + 1e-4)
    return normalized - group_relative(penalties, scale=False)


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, whitened: Callable[[Tensor], Tensor], *, gamma: float
) -> Tensor:
    """REINFORCE++: the discounted return of each token, whitened over the step, (B, R).

        G_t = r_t + gamma * G_{t+1}     t + 1 as in `gae`
        A_t = whitened(G_t)

    Source: Hu, https://arxiv.org/abs/2501.03262, equations 4 and 5. Rewards are (B, R), including
    score and KL penalty; `whitened` gives them mean 0 and variance 1 over the tokens of all ranks.
    """
    return whitened(gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[1])


@torch.no_grad()
def reverse_kl(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Distillation: each token answers for its own log ratio to the teacher, (B, R).

        A_t = log p_teacher(token_t) - log p(token_t)

    In expectation over tokens of the policy, its gradient is that of -KL(policy || teacher) of the
    next token, given the tokens before it.

    Source: Agarwal et al., https://arxiv.org/abs/2306.13649 (on-policy data, reverse KL); Lu and
    Thinking Machines Lab 2025, https://thinkingmachines.ai/blog/on-policy-distillation (one sampled
    token in place of the vocabulary). `log_ratios` are (B, R), of the policy to the teacher.
    """
    check_shapes(mask, log_ratios=log_ratios)
    return torch.where(mask, -log_ratios, 0.0).float()


@torch.no_grad()
def reinforce(
    returns: Tensor, moments: Callable[[Tensor], tuple[Tensor, Tensor]], *, reinforce_baseline: str
) -> Tensor:
    """REINFORCE: compare each response with the mean of the step, or with nothing.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696. Returns are (K, G), and include the
    KL penalty; `moments` gives the mean and the variance over all ranks.
    """
    return returns if reinforce_baseline == "none" else returns - moments(returns)[0].float()


@torch.no_grad()
def to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give each chosen token the advantage of its response: (B,) to (B, R) float32."""
    _check_one_a_row("advantages", advantages, mask)
    check_shapes(mask)
    return torch.where(mask, advantages.unsqueeze(1), 0.0).float()


def _check_one_a_row(name: str, values: Tensor, mask: Tensor) -> None:
    if values.shape != mask.shape[:1]:
        raise ValueError(
            f"{name} is {tuple(values.shape)}, mask is {tuple(mask.shape)}; expected one number "
            "per row of the mask"
        )


def _check_groups(returns: Tensor) -> None:
    if returns.dim() != 2 or returns.shape[0] < 2:
        raise ValueError(
            f"returns is {tuple(returns.shape)}; expected (K, G) with K >= 2 responses per prompt"
        )
