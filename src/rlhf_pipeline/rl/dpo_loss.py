"""Loss of direct preference optimization.

Shapes: N comparisons. `normalizer` is that of `rl.ppo_losses`, in comparisons instead of tokens.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_pipeline.rl.masking import check_same_shape


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    normalizer: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood of the preferences under Bradley-Terry with implicit rewards.

        r(y) = beta * (log pi(y) - log pi_ref(y))
        m_i  = r(chosen_i) - r(rejected_i)
        L    = -sum_i ((1 - e) * log sigmoid(m_i) + e * log sigmoid(-m_i)) / normalizer

    Source: Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7. With e > 0: conservative
    DPO (Mitchell, https://ericmitchell.ai/cdpo.pdf), which assumes that a preference is wrong with
    probability e. Its minimum is at the margin log((1 - e) / e) instead of infinity.

    Args:
        chosen_logprobs, rejected_logprobs: (N,), of whole responses under the policy; the only
            arguments with a gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: (N,), under the reference.
        beta: scale of the implicit rewards, reward per nat of log ratio.
        label_smoothing: e, in [0, 0.5).

    Returns:
        The loss, 0-dim float32; the implicit rewards of the chosen and of the rejected responses,
        (N,) float32 each, without gradient.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    chosen_rewards = beta * (chosen_logprobs.float() - ref_chosen_logprobs.detach().float())
    rejected_rewards = beta * (rejected_logprobs.float() - ref_rejected_logprobs.detach().float())
    margin = chosen_rewards - rejected_rewards
    likelihood = (1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)
    return -likelihood.sum() / normalizer, chosen_rewards.detach(), rejected_rewards.detach()
