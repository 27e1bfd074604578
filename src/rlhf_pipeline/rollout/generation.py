"""The interface of generation: prompts in, sampled responses out.

Training and evaluation use the protocol `Generator` only. A new backend is a class with its
`generate` method, like `TransformersGenerator`, and a name in `config.doors`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.config.doors import PPO_GENERATOR, by_name
from rlhf_pipeline.config.training import HybridConfig, SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.lean_transformers import PreTrainedModel
from rlhf_pipeline.rollout.records import Rollout

Seed = tuple[int, ...]
"""The randomness of one response, for example (seed, step, row of the global batch)."""


class Generator(Protocol):
    """Samples from a policy."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample a response to each prompt. All ranks call this together.

        A response depends on the policy, its prompt and its seed only, not on the ranks or micro
        batches that the batch is divided into, apart from rounding on a GPU (docs/cache.md). So two
        policies can use the same randomness.

        `prompts` are token ids; rows with equal `prompt_numbers` have the same prompt, which need
        be read only once (`models.sequences.collate`). Responses are in the order of the prompts,
        each cut after its EOS.
        """


def load_generator(
    name: str,
    policy: PreTrainedModel | DeepSpeedEngine,
    contract: TokenContract,
    sampling: SamplingConfig,
    world: World,
    *,
    gather: bool,
    longest_prompt: Callable[[], int],
    place: str,
    hybrid: HybridConfig | None = None,
    **for_auto: Any,
) -> Generator:
    """What samples from a policy, in training and in evaluation.

    All ranks call this together. `longest_prompt` counts the tokens of the longest prompt;
    `place` is the parameter that chose the generator, for messages. The generator's class gets what
    its parameters name; `longest` are the tokens of the longest sequence, `rows` the most of them,
    and `for_auto` what the choice of `chosen_generator` needs besides.
    """
    make = PPO_GENERATOR.load(name)
    given = {
        "policy": policy,
        "contract": contract,
        "sampling": sampling,
        "world": world,
        "gather": gather,
        "hybrid": hybrid,
        "rows": sampling.batch_size_per_gpu,
        "place": place,
        **for_auto,
    }
    if "longest" in inspect.signature(make).parameters:
        given["longest"] = longest_prompt() + sampling.max_response_tokens
    generator: Generator = by_name(make, **given)
    return generator


def row_seeds(seed: int, step: int, rows: np.ndarray) -> list[Seed]:
    """The seeds of rows of a global batch at one step."""
    return [(seed, step, int(row)) for row in rows]


def uniform_draws(seeds: Sequence[Seed], width: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, width) float64; a row is a function of its seed alone."""
    return torch.from_numpy(
        np.stack([np.random.default_rng(list(seed)).random(width) for seed in seeds])
    )
