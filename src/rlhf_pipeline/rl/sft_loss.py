"""Language-model loss of SFT and PPO-ptx.

Shapes: B sequences, R response tokens. A mask is (B, R) bool, True = real token.

A loss is a float32 sum divided by `normalizer`, the number of real tokens in one optimizer step
over all ranks and micro batches. Losses therefore add up to the mean over the whole batch; an
engine that averages over ranks or micro batches must undo that.
"""

from torch import Tensor

from rlhf_pipeline.rl.masking import masked_sum


def sft_loss(logprobs: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Negative log-likelihood of the tokens of a demonstrated response or of plain text.

        L = -sum_t log p(token_t) / normalizer

    `logprobs` are (B, R). Raises ValueError if a shape is wrong.
    """
    return -masked_sum(logprobs.float(), mask) / normalizer
