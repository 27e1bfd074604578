from types import SimpleNamespace

import pytest
import torch

from rlhf_pipeline.distributed import micro_batches as module
from rlhf_pipeline.distributed.micro_batches import grouped, micro_batches, split
from rlhf_pipeline.models.forms import Form

LENGTHS = torch.tensor([9, 1, 5, 2, 8])


def lists(groups):
    return [group.tolist() for group in groups]


@pytest.mark.parametrize(
    ("tokens", "padded", "expected"),
    [
        (10, False, [[0], [4], [2, 3, 1]]),
        (10, True, [[0], [4], [2, 3], [1]]),
        (17, False, [[0, 4], [2, 3, 1]]),
        (18, True, [[0, 4], [2, 3, 1]]),
        (1, False, [[0], [4], [2], [3], [1]]),
        (1000, True, [[0, 4, 2, 3, 1]]),
    ],
)
def test_groups_are_filled_from_the_longest_row_to_the_shortest(tokens, padded, expected):
    """Padding counts if the model computes it: three rows of 5 are 15 tokens, and not 8."""
    assert lists(grouped(LENGTHS, tokens, padded=padded)) == expected


def test_groups_of_most_rows_are_split():
    groups = grouped(LENGTHS, 1000, padded=False)
    assert lists(split(groups, 2)) == [[0, 4, 2], [3, 1]]
    assert lists(split(groups, 4)) == [[0], [4], [2], [3, 1]]
    assert lists(split(groups, 5)) == [[0], [4], [2], [3], [1]]


def test_all_ranks_make_as_many_groups_as_the_rank_with_the_most(monkeypatch):
    monkeypatch.setattr(module, "form_of", lambda model: Form(packed=True, head=None))
    world = SimpleNamespace(most=lambda counts: [max(counts[0], 4), max(counts[1], 1)])
    first, second = micro_batches([LENGTHS, LENGTHS[:2]], 17, None, world)
    assert lists(first) == [[0], [4], [2, 3], [1]]
    assert lists(second) == [[0, 1]]


def test_the_longest_row_is_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(module.heartbeat, "row", reported.append)
    grouped(LENGTHS, 17, padded=False)
    grouped(LENGTHS[1:4], 17, padded=True)
    assert reported == [9, 5]
