"""Advantage estimation: per token with a critic, or per response without one.

Shapes: B sequences, R response tokens (right-padded), G prompts with K responses each.
A mask is (B, R) bool, True = real token.
"""

import torch
from torch import Tensor

from rlhf_pipeline.rl.masking import check_right_padded, check_shapes


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over whole responses.

        delta_t = r_t + gamma * V_{t+1} - V_t     V = 0 after the last real token
        A_t     = delta_t + gamma * lam * A_{t+1}
        G_t     = A_t + V_t

    Source: Schulman et al., https://arxiv.org/abs/1506.02438, equation 16; G_t is the TD(lambda)
    return.

    Args:
        rewards: (B, R), including the score.
        values: (B, R), value of the state before each response token.
        gamma: discount, 1.0 in RLHF.
        lam: 0 = one-step TD, 1 = Monte Carlo.

    Returns:
        advantages, returns: (B, R) float32 each, not whitened, 0 in padding, without gradient.

    Raises:
        ValueError: a shape is wrong, or a row is not right-padded.
    """
    check_shapes(mask, rewards=rewards, values=values)
    check_right_padded(mask)
    # With zeros in padding, the recursion starts from V = 0 and A = 0 after each row's last token.
    rewards = torch.where(mask, rewards, 0.0).float()
    values = torch.where(mask, values, 0.0).float()
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values

    advantage = torch.zeros_like(deltas[:, 0])
    backwards = []
    for delta in reversed(deltas.unbind(dim=1)):
        advantage = delta + gamma * lam * advantage
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


@torch.no_grad()
def leave_one_out(returns: Tensor) -> Tensor:
    """RLOO: compare each response with the mean of the other responses to its prompt.

        A_i = R_i - sum_{j != i} R_j / (K - 1)

    Source: Ahmadian et al., https://arxiv.org/abs/2402.14740, equation 8; R includes the KL
    penalty.

    Returns are (K, G), one prompt per column; so are the advantages, float32 without gradient.
    Raises ValueError if there are not two dimensions, or K < 2.
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

    Returns are (K, G), one prompt per column; so are the advantages, float32 without gradient, 0 if
    all returns of a prompt are equal. Raises ValueError if there are not two dimensions, or K < 2.
    """
    _check_groups(returns)
    returns = returns.double()
    centred = returns - returns.mean(dim=0)
    return (centred / (returns.std(dim=0) + 1e-4) if scale else centred).float()


@torch.no_grad()
def to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give each token the advantage of its response: (B,) to (B, R) float32, 0 in padding.

    Raises ValueError if a shape or the mask's dtype is wrong.
    """
    if advantages.shape != mask.shape[:1]:
        raise ValueError(
            f"advantages is {tuple(advantages.shape)}, mask is {tuple(mask.shape)}; expected one "
            "advantage per row of the mask"
        )
    check_shapes(mask)
    return torch.where(mask, advantages.unsqueeze(1), 0.0).float()


def _check_groups(returns: Tensor) -> None:
    if returns.dim() != 2 or returns.shape[0] < 2:
        raise ValueError(
            f"returns is {tuple(returns.shape)}; expected (K, G) with K >= 2 responses per prompt"
        )
