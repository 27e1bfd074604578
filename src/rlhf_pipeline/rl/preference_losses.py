"""Losses of comparisons and of single answers for a policy, as pairs: see `rl.losses`.

All tensors are (N,), for N comparisons or answers: log-probabilities of whole answers, EOS
included; log ratios, those of the policy minus those of its reference; lengths, the numbers of
tokens. Only values of the policy have a gradient. `beta` is the reward per nat of log ratio.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_pipeline.rl.losses import LossSum, count_of
from rlhf_pipeline.rl.masking import check_same_shape


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Negative log-likelihood of the preferences under Bradley-Terry with implicit rewards.

        m_i  = r(chosen_i) - r(rejected_i)     r(y) = beta * (log pi(y) - log pi_ref(y))
        L    = -sum_i ((1 - e) * log sigmoid(m_i) + e * log sigmoid(-m_i))

    Source: Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7. e, in [0, 0.5), is
    `label_smoothing`; above 0 it is the probability of a wrong preference in conservative DPO
    (Mitchell, https://ericmitchell.ai/cdpo.pdf).
    """
    check_same_shape(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    chosen_rewards = beta * log_ratios(chosen_logprobs, ref_chosen_logprobs)
    rejected_rewards = beta * log_ratios(rejected_logprobs, ref_rejected_logprobs)
    margin = chosen_rewards - rejected_rewards
    likelihood = (1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)
    return -likelihood.sum(), count_of(margin)


def robust_dpo_loss(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float, label_smoothing: float
) -> LossSum:
    """DPO's loss without the bias of wrong preferences: its mean is that of the right ones.

        m_i  = beta * (chosen_i - rejected_i)     of the log ratios
        L    = -sum_i ((1 - e) * log sigmoid(m_i) - e * log sigmoid(-m_i)) / (1 - 2 * e)

    e, in [0, 0.5), is `label_smoothing`. Source: Chowdhury et al., "Provably robust DPO",
    https://arxiv.org/abs/2403.00409, section 3.
    """
    margin = beta * _difference(chosen_log_ratios, rejected_log_ratios)
    right, wrong = (1 - label_smoothing) * logsigmoid(margin), label_smoothing * logsigmoid(-margin)
    return -(right - wrong).sum() / (1 - 2 * label_smoothing), count_of(margin)


def hinge_loss(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float) -> LossSum:
    """Shortfall of the margin of the implicit rewards from 1.

        L = sum_i max(0, 1 - beta * (chosen_i - rejected_i))     of the log ratios

    Source: Zhao et al., "SLiC-HF", https://arxiv.org/abs/2305.10425, equation 1, on log ratios as
    in Liu et al., https://arxiv.org/abs/2309.06657 (hinge-norm).
    """
    margin = beta * _difference(chosen_log_ratios, rejected_log_ratios)
    return (1 - margin).clamp(min=0).sum(), count_of(margin)


def ipo_loss(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
) -> LossSum:
    """Squared distance of the margin from 1 / (2 * beta).

        h_i = chosen_i / |chosen_i| - rejected_i / |rejected_i|     of the log ratios
        L   = sum_i (h_i - 1 / (2 * beta))^2

    Source: Azar et al., https://arxiv.org/abs/2310.12036, equation 17, with beta for tau. The paper
    has sums over tokens; its authors used means, as TRL's source reports.
    """
    margin = _difference(chosen_log_ratios / chosen_lengths, rejected_log_ratios / rejected_lengths)
    return (margin - 1 / (2 * beta)).square().sum(), count_of(margin)


def normalized_dpo_loss(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
) -> LossSum:
    """DPO's loss on the log ratio of a mean token, so that length alone is no reward.

        L = -sum_i log sigmoid(beta * h_i)     h: as in `ipo_loss`

    Source: Lambert et al., "Tulu 3", https://arxiv.org/abs/2411.15124, section 5, with beta = 5.
    """
    margin = _difference(chosen_log_ratios / chosen_lengths, rejected_log_ratios / rejected_lengths)
    return -logsigmoid(beta * margin).sum(), count_of(margin)


def simpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    target_margin: float,
) -> LossSum:
    """Likelihood of the preferences by the log-probability of a mean token, without a reference.

        d_i = log pi(chosen_i) / |chosen_i| - log pi(rejected_i) / |rejected_i|
        L   = -sum_i log sigmoid(beta * d_i - target_margin)

    Source: Meng et al., "SimPO", https://arxiv.org/abs/2405.14734, equation 6.
    """
    margin = _difference(
        chosen_logprobs.float() / chosen_lengths, rejected_logprobs.float() / rejected_lengths
    )
    return -logsigmoid(beta * margin - target_margin).sum(), count_of(margin)


def chosen_nll(chosen_logprobs: Tensor, chosen_lengths: Tensor) -> LossSum:
    """Negative log-likelihood of the chosen answers, of each the mean over its tokens.

        L = -sum_i log pi(chosen_i) / |chosen_i|

    Source: Pang et al., "Iterative reasoning preference optimization",
    https://arxiv.org/abs/2404.19733, equation 1, which adds it to DPO's loss with a weight.
    """
    means = chosen_logprobs.float() / chosen_lengths
    return -means.sum(), count_of(means)


def kto_loss(
    log_ratios: Tensor,
    is_good: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> LossSum:
    """Lost value of answers that are known to be good or bad, as people value gains and losses.

        L = sum_i desirable_weight * (1 - sigmoid(beta * (r_i - kl)))        of the good answers
          + sum_i undesirable_weight * (1 - sigmoid(beta * (kl - r_i)))      of the bad ones

    r are the log ratios, `is_good` is bool; `kl`, 0-dim, is the KL of policy and reference.

    Source: Ethayarajh et al., https://arxiv.org/abs/2402.01306, section 4.1.
    """
    check_same_shape(log_ratios=log_ratios, is_good=is_good)
    gain = beta * (log_ratios - kl.detach())
    good, bad = desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid()
    losses = good.where(is_good, bad)
    return losses.sum(), count_of(losses)


def log_ratios(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi(y) - log pi_ref(y) of answers, float32."""
    return logprobs.float() - ref_logprobs.detach().float()


def _difference(chosen: Tensor, rejected: Tensor) -> Tensor:
    check_same_shape(chosen=chosen, rejected=rejected)
    return chosen - rejected
