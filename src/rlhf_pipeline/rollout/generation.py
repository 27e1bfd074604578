"""The interface of generation: prompts in, sampled responses out.

Training and evaluation use the protocol `Generator` only. A new backend is a class with its
`generate` method, like `TransformersGenerator`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.models.sequences import Sequences

Seed = tuple[int, ...]
"""The randomness of one response, for example (seed, step, row of the global batch)."""


@dataclass(frozen=True)
class Rollout:
    """Prompts with their sampled responses."""

    sequences: Sequences
    logprobs: Tensor
    """(B, R) float32: log-probabilities of the response tokens according to the sampler."""


class Generator(Protocol):
    """Samples from a policy."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[Seed]
    ) -> Rollout:
        """Sample a response to each prompt. All ranks call this together.

        A response depends on the policy, its prompt and its seed only, not on the ranks or micro
        batches that the batch is divided into, apart from rounding on a GPU (docs/cache.md). So two
        policies can use the same randomness.

        `prompts` are token ids. Responses are in the order of the prompts, each cut after its EOS.
        """


def row_seeds(seed: int, step: int, rows: np.ndarray) -> list[Seed]:
    """The seeds of rows of a global batch at one step."""
    return [(seed, step, int(row)) for row in rows]


def uniform_draws(seeds: Sequence[Seed], width: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, width) float64; a row is a function of its seed alone."""
    return torch.from_numpy(
        np.stack([np.random.default_rng(list(seed)).random(width) for seed in seeds])
    )
