"""Seeds of responses, and the random numbers made from them."""

import numpy as np
import torch

from rlhf_pipeline.rollout.generation import row_seeds, uniform_draws


def test_a_seed_contains_the_run_seed_the_step_and_the_row():
    assert row_seeds(7, 3, np.array([1, 3])) == [(7, 3, 1), (7, 3, 3)]


def test_draws_depend_on_the_seed_of_their_row_only():
    whole = uniform_draws(row_seeds(7, 3, np.arange(6)), 4)
    assert whole.dtype == torch.float64 and whole.shape == (6, 4)
    assert torch.equal(uniform_draws(row_seeds(7, 3, np.array([1, 3, 5])), 4), whole[1::2])
    assert not torch.equal(uniform_draws(row_seeds(7, 4, np.arange(6)), 4), whole)
    assert not torch.equal(uniform_draws(row_seeds(8, 3, np.arange(6)), 4), whole)
