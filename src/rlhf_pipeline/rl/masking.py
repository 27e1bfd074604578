"""Reductions over real tokens only: what lies in padding, NaN included, never changes a result.

Shapes: B sequences, R response tokens. A mask is bool, True = real token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would broadcast: (B,) against (B, 1) is (B, B) and no error.

    Raises:
        ValueError: a tensor's shape differs from the first one's.
    """
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, {first_name} is {tuple(first.shape)}; they must be equal"
            )


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Refuse a mask that is not bool and tensors that are not of the mask's shape.

    Raises:
        ValueError: the mask's dtype, or a tensor's shape, is wrong.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; it must be torch.bool, True = real token")
    check_same_shape(mask=mask, **tensors)


def check_right_padded(mask: Tensor) -> None:
    """Refuse a (B, R) mask with a real token after a padded one. Costs one device synchronization.

    Raises:
        ValueError: some row is not real tokens followed by padding.
    """
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError(
            "mask has a real token after padding; responses must be padded on the right, without gaps"
        )


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over real tokens: a 0-dim tensor; 0 where the mask is empty.

    The gradient is 0 in padding. A NaN computed there from something trainable still spoils the gradient of what it was
    computed from (0 * NaN): mask the inputs of exp, log and division, not only their results.

    Args:
        x: (B, R).
        mask: (B, R) bool.
    """
    check_shapes(mask, x=x)
    return torch.where(mask, x, 0.0).sum()


def masked_row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row's x over its real tokens, (B,): of log-probabilities, that of the whole response.

    Padding is as in `masked_sum`; a row without a real token sums to 0.

    Args:
        x: (B, R).
        mask: (B, R) bool.
    """
    check_shapes(mask, x=x)
    return torch.where(mask, x, 0.0).sum(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over real tokens: a 0-dim tensor; NaN where the mask is empty, as `torch.mean` of nothing."""
    return masked_sum(x, mask) / mask.sum()


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """[count, sum, sum of squares] of x over real tokens: float64, shape (3,).

    Additive: the sum over micro batches and ranks is that of the whole batch. float64 because the variance is the
    difference of two sums.

    Args:
        x: (B, R).
        mask: (B, R) bool.
    """
    check_shapes(mask, x=x)
    real = torch.where(mask, x, 0.0).double()
    return torch.stack([mask.sum().double(), real.sum(), real.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance (divided by the count) from `masked_moments`; (0, 0) where the count is 0."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    return mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0)


def whiten(x: Tensor, mask: Tensor, moments: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the global masked batch.

        (x - mean) / sqrt(variance + 1e-8)         population variance; + mean where `shift_mean` is false

    Moments are passed in because a rank that whitens by its own gives its gradient another scale than its peers'.
    A batch of one real token, or of equal ones, becomes 0.

    Args:
        x: (B, R).
        mask: (B, R) bool.
        moments: (3,) float64, `masked_moments` summed over every micro batch and rank.
        shift_mean: False scales only, and the mean stays what it is.

    Returns:
        (B, R) float32, 0 in padding.
    """
    check_shapes(mask, x=x)
    mean, variance = mean_and_variance(moments)
    white = (x.double() - mean) / (variance + 1e-8).sqrt()
    return torch.where(mask, white if shift_mean else white + mean, 0.0).float()
