"""Reductions over the tokens of a mask; values outside, including NaN, never change a result.

Shapes: B sequences, R response tokens; x is (B, R), a mask is (B, R) bool, True = the token counts.
"""

import torch
from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError for tensors that would broadcast, such as (B,) and (B, 1)."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, {first_name} is {tuple(first.shape)}; "
                "expected equal shapes"
            )


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError for a mask that is not bool, and for tensors of another shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask: found {mask.dtype}, expected torch.bool, True = the token counts")
    check_same_shape(mask=mask, **tensors)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the mask, 0-dim; 0 if the mask is empty.

    The gradient is 0 outside. A NaN computed there still makes the gradient of its inputs
    NaN (0 * NaN), so mask the inputs of exp, log and division, not only their results.
    """
    check_shapes(mask, x=x)
    return torch.where(mask, x, 0.0).sum()


def masked_row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the mask in each row, (B,); 0 for an empty row. Gradients: see `masked_sum`."""
    check_shapes(mask, x=x)
    return torch.where(mask, x, 0.0).sum(-1)


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of x over the mask, (3,) float64.

    They add up over micro batches and ranks; the variance is the difference of two sums.
    """
    check_shapes(mask, x=x)
    real = torch.where(mask, x, 0.0).double()
    return torch.stack([mask.sum().double(), real.sum(), real.square().sum()])


def mean_and_variance(moments: Tensor, *, correction: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance from `masked_moments`, 0-dim each; 0 if the count is 0.

    The variance divides by the count minus `correction`.
    """
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return mean, variance * (count / (count - correction).clamp(min=1))


def whiten(x: Tensor, mask: Tensor, moments: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Shift and scale x to mean 0 and variance 1 over the global batch, (B, R) float32.

        (x - mean) / sqrt(variance + 1e-8)     population variance; + mean if `shift_mean` is false

    `moments` are `masked_moments` summed over all micro batches and ranks: with others, the
    gradients of ranks would have different scales. Equal numbers become 0.
    """
    check_shapes(mask, x=x)
    mean, variance = mean_and_variance(moments)
    white = (x.double() - mean) / (variance + 1e-8).sqrt()
    return torch.where(mask, white if shift_mean else white + mean, 0.0).float()
