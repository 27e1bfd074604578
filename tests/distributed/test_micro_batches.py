from types import SimpleNamespace

import pytest
import torch

from rlhf_pipeline.distributed import micro_batches as module
from rlhf_pipeline.distributed.batches import grouped, micro_batches, split
from rlhf_pipeline.models.forms import Form

LENGTHS = torch.tensor([[[9, 0]], [[0, 1]], [[5, 0]], [[0, 2]], [[8, 0]]])


def lists(groups):
    return [group.tolist() for group in groups]


@pytest.mark.parametrize(
    ("tokens", "padded", "expected"),
    [
        (10, False, [[0], [4], [2, 3, 1]]),
        (14, True, [[0], [4], [2, 3], [1]]),
        (17, False, [[0, 4], [2, 3, 1]]),
        (18, True, [[0, 4], [2, 3], [1]]),
        (21, True, [[0, 4], [2, 3, 1]]),
        (1, False, [[0], [4], [2], [3], [1]]),
        (1000, True, [[0, 4, 2, 3, 1]]),
    ],
)
def test_groups_are_filled_from_the_longest_row_to_the_shortest(tokens, padded, expected):
    """Padding counts if the model computes it.

    Rows 2, 3 and 1 have a prompt of 5 and responses of 2 and 1: padded they are 3 rows of 5 + 2.
    """
    assert lists(grouped(LENGTHS, tokens, padded=padded)) == expected


def test_no_padded_group_exceeds_the_budget():
    """Responses are padded beside prompts: prompts of 255 and responses of 255 are 510 wide."""
    torch.manual_seed(0)
    prompts, responses = torch.randint(20, 256, (512,)), torch.randint(4, 256, (512,))
    groups = grouped(torch.stack([prompts, responses], 1)[:, None], 4096, padded=True)
    sizes = [len(rows) * int(prompts[rows].max() + responses[rows].max()) for rows in groups]
    assert max(sizes) <= 4096 and min(map(len, groups)) > 1
    assert sorted(torch.cat(groups).tolist()) == [*range(512)]
    assert lists(grouped(torch.tensor([[[3, 40]], [[40, 3]]]), 50, padded=True)) == [[0], [1]]


def test_both_answers_of_a_pair_are_padded():
    """Two pairs are 4 sequences of 3 + 9 tokens."""
    pairs = torch.tensor([[[3, 9], [3, 1]], [[2, 1], [2, 9]]])
    assert lists(grouped(pairs, 47, padded=True)) == [[0], [1]]
    assert lists(grouped(pairs, 48, padded=True)) == [[0, 1]]
    assert lists(grouped(pairs, 30, padded=False)) == [[0, 1]]


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
