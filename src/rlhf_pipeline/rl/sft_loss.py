"""The language-model loss of SFT and of PPO-ptx.

Shapes: B sequences, R response tokens. A mask is bool, True = real token.

Every loss is a sum divided by `normalizer`: the number of real tokens or comparisons over all micro batches and ranks of
one optimizer step. Added up, the losses give the gradient of the mean over the whole batch, however the batch is divided.
An engine that averages over ranks or micro batches must undo that. All arithmetic is in float32.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_pipeline.rl.masking import masked_sum


def sft_loss(logprobs: Tensor, mask: Tensor, *, normalizer: float | Tensor) -> Tensor:
    """Negative log-likelihood of the tokens that are learned: a demonstrated response's, or plain text's.

        L = -sum_t log p(token_t) / normalizer

    Args:
        logprobs: (B, R).
        mask: (B, R) bool.
        normalizer: real tokens.

    Returns:
        0-dim float32.

    Raises:
        ValueError: a shape is wrong.
    """
    return -masked_sum(logprobs.float(), mask) / normalizer
