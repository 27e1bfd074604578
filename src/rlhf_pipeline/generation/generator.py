"""The interface of generation: prompts in, sampled responses out.

Training and evaluation use the protocol `Generator` only. A new backend is a class with its
`generate` method, like `TransformersGenerator`, and a name in `config.doors`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.config.doors import PPO_GENERATOR, call_with
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.distributed.world import World, gather_json, own_device
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.generation.records import Rollout

if TYPE_CHECKING:
    from rlhf_pipeline.episodes.loop import Episodes

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
        each cut after its EOS. A generator may have a context `same_weights`: the policy does not
        change between the calls within it.
        """


@dataclass(frozen=True)
class Group:
    """The ranks that hold a copy of the policy together, and answer together."""

    rank: int  # this rank's number within the group
    size: int
    collectives: torch.distributed.ProcessGroup | None
    """None: all ranks, or one alone."""


def own_group(world: World, size: int) -> Group:
    """The group of this rank. All ranks call this together.

    Raises StageError if the ranks cannot be divided into groups of this size.
    """
    if world.size % size:
        raise StageError(
            f"hybrid.inference_tp_size: found {size}, expected a divisor of the {world.size} ranks"
        )
    if size in (1, world.size):
        return Group(world.rank % size, size, None)
    groups = [
        torch.distributed.new_group(list(range(first, first + size)))
        for first in range(0, world.size, size)
    ]
    return Group(world.rank % size, size, groups[world.rank // size])


def together(generate: Callable[..., Rollout]) -> Callable[..., Rollout]:
    """Decorate `generate` of a generator with a `group`: it gets the prompts of all its ranks."""

    @wraps(generate)
    def answered(
        self: Any,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[Seed],
        prompt_numbers: Sequence[int] | None = None,
    ) -> Rollout:
        if self.group.size == 1:
            return generate(self, prompts, sampling, seeds, prompt_numbers)
        own_share = [list(prompts), list(seeds), prompt_numbers and list(prompt_numbers)]
        shares = gather_json(own_share, own_device(), self.group.collectives)
        rows = self.group.size * sampling.batch_size_per_gpu
        found = generate(
            self,
            [prompt for own, *_ in shares for prompt in own],
            sampling.model_copy(update={"batch_size_per_gpu": rows}),
            [seed for _, own, _ in shares for seed in own],
            prompt_numbers and [number for *_, own in shares for number in own],
        )
        first = sum(len(own) for own, *_ in shares[: self.group.rank])
        own_rows = torch.arange(first, first + len(prompts))
        sequences = found.sequences.rows(own_rows)
        return Rollout(sequences, found.logprobs[own_rows, : sequences.response_ids.shape[1]])

    return answered


def load_generator(
    name: str, sampling: SamplingConfig, longest_prompt: Callable[[], int], **offered: Any
) -> Generator:
    """What samples from a policy, in training and in evaluation. All ranks call this together.

    The generator's class gets what its parameters name: the sampling, `longest`, the tokens of the
    longest sequence (`longest_prompt` counts those of the prompt), `rows`, the most of them at a
    time, and what is `offered`: `policy`, `contract`, `world`, `gather`, `hybrid`, and `place`, the
    parameter that chose the generator, for messages.
    """
    make = PPO_GENERATOR.load(name)
    if "longest" in inspect.signature(make).parameters:
        offered["longest"] = longest_prompt() + sampling.max_response_tokens
    rows = sampling.batch_size_per_gpu
    generator: Generator = call_with(make, sampling=sampling, rows=rows, **offered)
    return generator


def respond(
    generator: Generator,
    episodes: "Episodes | None",
    rows: Mapping[str, list[Any]],
    sampling: SamplingConfig,
    seeds: Sequence[Seed],
    shared: Seed,
) -> Rollout:
    """Answer rows of the prompts' table, in one turn or in episodes. All ranks call this together.

    `rows` have a `prompt_number`, equal for equal prompts. `shared` is the randomness that all
    responses have in common, for tools and environments.
    """
    if episodes is not None:
        return episodes.play(generator, rows, sampling, seeds, shared)
    return generator.generate(rows["prompt_ids"], sampling, seeds, rows["prompt_number"])


def row_seeds(seed: int, step: int, rows: np.ndarray) -> list[Seed]:
    """The seeds of rows of a global batch at one step."""
    return [(seed, step, int(row)) for row in rows]


def uniform_draws(seeds: Sequence[Seed], width: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, width) float64; a row is a function of its seed alone."""
    return torch.from_numpy(
        np.stack([np.random.default_rng(list(seed)).random(width) for seed in seeds])
    )
