"""Language-model loss of SFT and PPO-ptx.

Shapes: B sequences, R response tokens. Masks: bool, True = real token.

Every loss is a sum divided by `normalizer`: the number of real tokens in one optimizer step, over
all ranks and micro batches. Losses therefore add up to the mean over the whole batch, however it is
divided. An engine that averages over ranks or micro batches must undo that. All arithmetic is in
float32.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_pipeline.rl.masking import masked_sum


def sft_loss(logprobs: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Negative log-likelihood of the tokens of a demonstrated response or of plain text.

        L = -sum_t log p(token_t) / normalizer

    `logprobs` are (B, R), the mask is (B, R) bool; the loss is 0-dim float32.

    Raises:
        ValueError: a shape is wrong.
    """
    return -masked_sum(logprobs.float(), mask) / normalizer
