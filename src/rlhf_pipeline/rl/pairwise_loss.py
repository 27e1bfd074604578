"""Bradley-Terry loss of the reward model.

Shapes: N comparisons. `normalizer` is that of `rl.ppo_losses`, in comparisons instead of tokens.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_pipeline.rl.masking import check_same_shape


def pairwise_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, normalizer: float | Tensor
) -> Tensor:
    """Negative log-likelihood of the preferences under Bradley-Terry.

        L = -sum_i log sigmoid(chosen_i - rejected_i) / normalizer

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 1, with one comparison per
    pair.

    Scores are (N,); the loss is 0-dim float32. Raises ValueError if shapes differ.
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return -logsigmoid(chosen_scores.float() - rejected_scores.float()).sum() / normalizer
