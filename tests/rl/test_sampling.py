"""Tokens drawn by the inverse of a distribution function."""

import numpy as np
import torch

from rlhf_pipeline.rl.sampling import sampled


def sampled_token(
    draw: float, logits: list[float], temperature: float = 1.0, vocab_size: int | None = None
) -> int:
    draws = torch.tensor([draw], dtype=torch.float64)
    size = vocab_size or len(logits)
    tokens, logprobs = sampled(torch.tensor([logits]), draws, temperature, size)
    expected = (torch.tensor(logits[:size]) / temperature).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs, expected)
    return int(tokens)


def test_a_draw_selects_a_token_by_the_distribution_function():
    """Probabilities 1/4, 1/2, 1/4: the distribution function is 0.25, 0.75, 1."""
    logits = [0.0, float(np.log(2.0)), 0.0]
    draws = (0.0, 0.24, 0.26, 0.74, 0.76, 0.999999)
    assert [sampled_token(draw, logits) for draw in draws] == [0, 0, 1, 1, 2, 2]


def test_a_low_temperature_sharpens_the_distribution():
    """At temperature 1/2 the probabilities are 1/6, 4/6, 1/6: the function is 0.1667, 0.8333, 1."""
    logits = [0.0, float(np.log(2.0)), 0.0]
    draws = (0.16, 0.17, 0.83, 0.84)
    assert [sampled_token(draw, logits, temperature=0.5) for draw in draws] == [0, 1, 1, 2]


def test_padded_vocabulary_rows_are_never_sampled():
    assert sampled_token(0.999999, [0.0, 0.0, 50.0, 50.0], vocab_size=2) == 1


def test_a_token_of_probability_zero_is_not_sampled_by_the_largest_draw():
    assert sampled_token(1.0 - 1e-16, [0.0, -1e9, -1e9]) == 0
