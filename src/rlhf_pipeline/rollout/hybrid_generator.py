"""Generation from a sharded copy of the actor, refreshed before every rollout."""

from collections.abc import Sequence

import torch

from rlhf_pipeline.config.ppo import HybridConfig
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine, get_accelerator
from rlhf_pipeline.distributed.world import World, gather_json, own_device
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.rollout.generation import Rollout, Seed
from rlhf_pipeline.rollout.sharded_copy import Group, ShardedCopy
from rlhf_pipeline.rollout.transformers_generator import TransformersGenerator


class HybridGenerator:
    """Turns the weights in training into a model for generation, within the same processes.

    Weights of any ZeRO stage are gathered once for a rollout and sharded over groups of
    `inference_tp_size` ranks. Each group answers the prompts of its ranks together.
    """

    def __init__(
        self, actor: DeepSpeedEngine, contract: TokenContract, config: HybridConfig, world: World
    ) -> None:
        self._actor = actor
        self._contract = contract
        self._config = config
        self._group = own_group(world, config.inference_tp_size)
        copy = ShardedCopy(actor.module, self._group)  # an error shows before training
        self._copy = copy if config.pin_parameters else None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[Seed]
    ) -> Rollout:
        self._check_lengths(prompts, sampling)
        group, size = self._group, self._group.size
        copy = self._copy or ShardedCopy(self._actor.module, group)
        copy.refresh(self._config.tp_gather_partition_size)
        shares = gather_json([list(prompts), list(seeds)], own_device(), group.collectives)
        generator = TransformersGenerator(copy.model, self._contract)
        together = generator.generate(
            [prompt for own, _ in shares for prompt in own],
            sampling.model_copy(update={"batch_size_per_gpu": size * sampling.batch_size_per_gpu}),
            [seed for _, own in shares for seed in own],
        )
        first = sum(len(own) for own, _ in shares[: group.rank])
        rows = torch.arange(first, first + len(prompts))
        found = together.sequences.rows(rows)
        width = found.response_ids.shape[1]
        self._copy = copy if self._config.pin_parameters else None
        if self._config.release_inference_cache:
            get_accelerator().empty_cache()
        return Rollout(found, together.logprobs[rows, :width])

    def _check_lengths(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> None:
        limit = self._config.max_out_tokens
        needed = max(map(len, prompts)) + sampling.max_response_tokens
        if limit is not None and needed > limit:
            response = sampling.max_response_tokens
            raise StageError(
                f"ppo.hybrid.max_out_tokens: found {limit}, expected at least {needed}: a prompt "
                f"of {needed - response} tokens and ppo.sampling.max_response_tokens ({response}). "
                "Fix: raise it, or set it to null"
            )


def own_group(world: World, size: int) -> Group:
    """The group of this rank. All ranks call this together.

    Raises StageError if the ranks cannot be divided into groups of this size.
    """
    if world.size % size:
        raise StageError(
            f"ppo.hybrid.inference_tp_size: found {size}, expected a divisor of the "
            f"{world.size} ranks"
        )
    if size == world.size:
        return Group(world.rank, size, None)
    groups = [
        torch.distributed.new_group(list(range(first, first + size)))
        for first in range(0, world.size, size)
    ]
    return Group(world.rank % size, size, groups[world.rank // size])
