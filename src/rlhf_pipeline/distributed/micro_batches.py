"""Rows of a batch, divided into micro batches: the rows of one forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.forward import probe_capabilities
from rlhf_pipeline.runtime import heartbeat


def micro_batches(
    lengths: Sequence[Tensor], tokens: int, model: nn.Module, world: World
) -> list[list[Tensor]]:
    """Divide each batch into groups of row numbers with at most `tokens` tokens each.

    All ranks make equally many groups of a batch: ZeRO needs every rank in every forward pass. One
    collective decides for all batches.

    Args:
        lengths: for each batch, (N, S, 2) the tokens of this rank's rows, see `grouped`. Each rank
            has the same N.
        tokens: a longer row is a group of its own.
        model: decides whether padding counts.
    """
    padded = not probe_capabilities(model).packed
    groups = [grouped(own, tokens, padded=padded) for own in lengths]
    counts = world.most([len(found) for found in groups])
    return [split(found, count) for found, count in zip(groups, counts, strict=True)]


def grouped(lengths: Tensor, tokens: int, *, padded: bool) -> list[Tensor]:
    """Fill groups with rows from the longest to the shortest.

    The first group is the largest: if memory does not suffice, it shows at once. `lengths` are
    (N, S, 2), the tokens of prompt and response in the S sequences of each row. With `padded`, all
    sequences of a group are as wide as its longest prompt and its longest response together.
    """
    totals, widths = lengths.sum((1, 2)), lengths.amax(1).tolist()
    order = totals.argsort(descending=True, stable=True)
    groups: list[list[int]] = []
    total = prompt = response = 0
    in_order = totals[order].tolist()
    heartbeat.row(max(in_order, default=0))
    for row, length in zip(order.tolist(), in_order, strict=True):
        prompt, response = max(prompt, widths[row][0]), max(response, widths[row][1])
        total += length
        count = lengths.shape[1] * (len(groups[-1]) + 1) if groups else 0
        if not groups or (count * (prompt + response) if padded else total) > tokens:
            groups.append([])
            total, (prompt, response) = length, widths[row]
        groups[-1].append(row)
    return [torch.tensor(group) for group in groups]


def split(groups: list[Tensor], count: int) -> list[Tensor]:
    """Split the groups of most rows until there are `count` groups."""
    groups = list(groups)
    while len(groups) < count:
        most = max(range(len(groups)), key=lambda number: len(groups[number]))
        half = (len(groups[most]) + 1) // 2
        groups[most : most + 1] = groups[most].split(half)
    return groups
