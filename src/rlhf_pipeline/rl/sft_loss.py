"""Language-model loss of SFT and PPO-ptx.

Shapes: B sequences, R response tokens. A mask is (B, R) bool, True = real token. `normalizer` is
that of `rl.ppo_losses`.
"""

from torch import Tensor

from rlhf_pipeline.rl.masking import masked_sum


def sft_loss(logprobs: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Negative log-likelihood of the tokens of a demonstrated response or of plain text.

        L = -sum_t log p(token_t) / normalizer

    `logprobs` are (B, R). Raises ValueError if a shape is wrong.
    """
    return -masked_sum(logprobs.float(), mask) / normalizer
