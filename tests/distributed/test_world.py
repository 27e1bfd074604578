"""Numbers of all ranks."""

import torch

from rlhf_pipeline.distributed.world import World


def test_numbers_that_all_ranks_have_are_read_but_not_summed(monkeypatch):
    """Two ranks with the same values: sums are doubled, equal numbers are not."""
    monkeypatch.setattr(World, "sum", lambda world, tensor: 2 * tensor)
    world = World(0, 2, torch.device("cpu"))
    sums = {"tokens": torch.tensor(3), "loss": torch.tensor(1.5, requires_grad=True)}
    found = world.sums(sums, equal={"norm": torch.tensor(0.25)})
    assert found == {"tokens": 6.0, "loss": 3.0, "norm": 0.25}
    assert world.sums(sums) == {"tokens": 6.0, "loss": 3.0}
