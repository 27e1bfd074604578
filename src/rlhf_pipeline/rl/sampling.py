import torch
from torch import Tensor


def sampled(
    logits: Tensor, draws: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature) by inverting its CDF at given uniform numbers.

    A temperature of 0 is greedy: the most likely token, with its log-probability at temperature 1.

    Args:
        logits: (B, V). Columns beyond `vocab_size` have probability 0.
        draws: (B,) uniform numbers in [0, 1).

    Returns:
        Tokens (B,) long, and their log-probabilities (B,) float32.
    """
    probabilities = (logits[:, :vocab_size].double() / (temperature or 1)).softmax(-1)
    if temperature == 0:
        tokens = probabilities.argmax(-1, keepdim=True)
    else:
        cdf = probabilities.cumsum(-1)
        tokens = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)
    # For logits that are not finite, the search ends behind the last token. The log-probabilities
    # of the response show the fault later. A check of each token here would make the device wait.
    tokens = tokens.clamp(max=vocab_size - 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).log().float().squeeze(1)
