"""The loss of direct preference optimization.

Shapes: N comparisons.

Every loss is a sum divided by `normalizer`: the number of real tokens or comparisons over all micro batches and ranks of
one optimizer step. Added up, the losses give the gradient of the mean over the whole batch, however the batch is divided.
An engine that averages over ranks or micro batches must undo that. All arithmetic is in float32.
"""

from __future__ import annotations

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
    """Negative log-likelihood of the preferences under Bradley-Terry on the policy's implicit rewards.

        r(y) = beta * (log pi(y) - log pi_ref(y))
        m_i  = r(chosen_i) - r(rejected_i)
        L    = -sum_i ((1 - e) * log sigmoid(m_i) + e * log sigmoid(-m_i)) / normalizer

    Source: Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7; for e > 0 conservative DPO, Mitchell,
    https://ericmitchell.ai/cdpo.pdf, where a preference is wrong with probability e. Its loss is lowest at the margin
    log((1 - e) / e) instead of at infinity.

    Args:
        chosen_logprobs, rejected_logprobs: (N,), of whole responses under the policy; the only arguments that get a
            gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: (N,), under the reference.
        beta: nats of reward per nat of log ratio.
        label_smoothing: e, in [0, 0.5).
        normalizer: comparisons.

    Returns:
        The loss, 0-dim float32, and without gradient the implicit rewards of the chosen and of the rejected responses,
        (N,) float32 each.

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
