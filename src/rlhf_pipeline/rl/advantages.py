"""From rewards of tokens, or returns of responses, to the advantage of each token.

Shapes: B sequences, R response tokens, G prompts with K responses each, S sources of rewards. A
mask is (B, R) bool, True = the policy chose the token. The other tokens, padding or a turn of a
tool, may stand anywhere: they get 0, and a step leads from one chosen token to the next.

`moments(x)` gives mean and variance (divisor N - 1) of numbers over all ranks, 0-dim each.
`whitened(x)` gives x, (B, R), mean 0 and variance 1 over the tokens of all ranks.

All functions raise ValueError if a shape is wrong.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_shapes
from rlhf_pipeline.rl.rewards import check_one_a_row

Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


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
    section 4.1. Rewards include the score; values are those of the state before each token.

    Returns:
        advantages, returns: (B, R) float32 each, not whitened, 0 outside the mask, no gradient.
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
    penalty. Returns and advantages are (K, G), one prompt per column. K is at least 2.
    """
    _check_groups(returns)
    others = returns.shape[0] - 1
    return returns.float() - (returns.sum(dim=0) - returns).float() / others


@torch.no_grad()
def group_relative(returns: Tensor, *, scale: bool) -> Tensor:
    """GRPO: center and scale each response's return by all responses to its prompt.

        A_i = (R_i - mean(R)) / (std(R) + 1e-4)     with `scale`; std divides by K - 1
        A_i = R_i - mean(R)                         without `scale`

    Source: Shao et al., https://arxiv.org/abs/2402.03300, section 4.1.2; without scale: Liu et al.,
    https://arxiv.org/abs/2503.20783. The divisor K - 1 and the constant are those of TRL. The
    constant and float64 keep rounding errors of equal returns small. Shapes: `leave_one_out`.
    """
    _check_groups(returns)
    returns = returns.double()
    centred = returns - returns.mean(dim=0)
    return (centred / (returns.std(dim=0) + 1e-4) if scale else centred).float()


@torch.no_grad()
def grpo(scores: Tensor, penalties: Tensor, moments: Moments, *, scale_rewards: str) -> Tensor:
    """GRPO with a KL penalty beside the score; all are (K, G), like `group_relative`.

    The divisor is that of the `group`, that of all scores of the step (`batch`: Liu et al.,
    https://arxiv.org/abs/2508.08221), or `none`. Only scores are scaled: a group of equal scores
    would learn from the penalty's noise in full.
    """
    relative = group_relative(scores, scale=scale_rewards == "group")
    if scale_rewards == "batch":
        relative /= moments(scores)[1].float().sqrt() + 1e-4
    return relative - group_relative(penalties, scale=False)


@torch.no_grad()
def gdpo(
    parts: Tensor, weights: Tensor, shaping: Tensor, penalties: Tensor, moments: Moments
) -> Tensor:
    """GDPO: scale each reward within its group before the sum, and the sum over the step.

        S_i = sum_s w_s * (R_si - mean(R_s)) / (std(R_s) + 1e-4)
        A_i = (S_i - mean(S)) / (std(S) + 1e-4) + shaping_i - mean(shaping)
              - (penalty_i - mean(penalty))

    Source: Liu et al., https://arxiv.org/abs/2601.05242, equations 4 to 6. Parts are (S, K, G),
    weights (S,), penalties of the KL (K, G). Shaping (K, G), which lowers scores of cut and long
    responses, is not scaled, because a small one would act like a large one.
    """
    scaled = torch.stack([group_relative(part, scale=True) for part in parts])
    total = (weights.view(-1, 1, 1) * scaled).sum(0)
    mean, variance = moments(total)
    normalized = (total - mean.float()) / (variance.float().sqrt() + 1e-4)
    return normalized + group_relative(shaping - penalties, scale=False)


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, whitened: Callable[[Tensor], Tensor], *, gamma: float
) -> Tensor:
    """REINFORCE++: the discounted return of each token, whitened over the step, (B, R).

        G_t = r_t + gamma * G_{t+1}     t + 1 as in `gae`
        A_t = whitened(G_t)

    Source: Hu, https://arxiv.org/abs/2501.03262, equations 4 and 5. Rewards include score and KL
    penalty.
    """
    return whitened(gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[1])


@torch.no_grad()
def reinforce_plus_plus_baseline(
    returns: Tensor, mask: Tensor, whitened: Callable[[Tensor], Tensor]
) -> Tensor:
    """REINFORCE++-baseline: compare with the prompt's other responses, scale by the whole step.

        A_t = whitened(R_i - mean(R))     for each token t of response i, (B, R)

    Source: Hu et al., https://arxiv.org/abs/2501.03262; whitened over tokens, as in OpenRLHF and
    verl. Returns are (K, G), and include the KL penalty.
    """
    return whitened(to_tokens(group_relative(returns, scale=False).flatten(), mask))


@torch.no_grad()
def reinforce(returns: Tensor, moments: Moments, *, reinforce_baseline: str) -> Tensor:
    """REINFORCE: compare each response with the mean of the step, or with nothing.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696. Returns are (K, G), and include the
    KL penalty.
    """
    return returns if reinforce_baseline == "none" else returns - moments(returns)[0].float()


@torch.no_grad()
def to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give each chosen token the advantage of its response: (B,) to (B, R) float32."""
    check_one_a_row("advantages", advantages, mask)
    check_shapes(mask)
    return torch.where(mask, advantages.unsqueeze(1), 0.0).float()


def _check_groups(returns: Tensor) -> None:
    if returns.dim() != 2 or returns.shape[0] < 2:
        raise ValueError(
            f"returns is {tuple(returns.shape)}; expected (K, G) with K >= 2 responses per prompt"
        )
