"""Frozen weights keep their bits, and weights that train move: digests tell, without a copy."""

from collections.abc import Mapping
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pipeline.distributed.engine_state import saved_tensors
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, fp32_shards, pieces
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat


def check_frozen(models: Mapping[str, nn.Module], world: World, start: dict[str, int]) -> None:
    """Raise StageError if a bit that no step trains differs from `start`, the digests by name.

    An empty one is filled; then, ranks must have equal weights unless each has its own shard.
    """
    shard, all_ = f", shard {world.rank}", models.items()
    named = ((f"{model}: {name}", x) for model, m in all_ for name, x in m.named_parameters())
    frozen = {name: x for name, x in named if not x.requires_grad}
    parts = {n + shard * hasattr(x, "ds_id"): getattr(x, "ds_tensor", x) for n, x in frozen.items()}
    ranks = world.gather({name: digest(part) for name, part in parts.items()})
    for name in () if start else {name for found in ranks for name in found}:
        start[name] = mode(found[name] for found in ranks if name in found)
    for rank, found in enumerate(ranks):
        if different := [name for name, bits in found.items() if bits != start[name]]:
            raise StageError(
                f"{different[0]}: found other bits on rank {rank} ({len(different)} weights), "
                "expected those of the start and of other ranks: it is frozen. Fix: run the same "
                "command again; if it recurs, test the memory of that GPU or machine"
            )


def require_learned(engine: DeepSpeedEngine, world: World, known: Any, place: str) -> None:
    """Raise StageError if no step taught, no gradient was other than 0, or no weight has moved.

    `known`: the `trained_digest` of the start, and which steps of groups `taught`.
    """
    schedule, (_, memory) = engine.lr_scheduler, engine.optimizer.param_groups[0]["betas"]
    rates = [schedule.base_lrs[0] * schedule.lr_lambdas[0](i) for i in range(schedule.last_epoch)]
    squares = saved_tensors(engine, None).get("exp_avg_sq", [])  # of gradients, by Adam
    has_gradient = world.any(any(bool(shard.any()) for shard in squares))
    has_moved = trained_digest(engine, world) != known[place.rpartition(".")[2]]
    if not any(taught := known.get("taught", [True])):
        found = f"groups of equal scores alone in all {len(taught)} steps"
        fix = "check the rewards, choose prompts that are solved sometimes, or sample more answers"
    elif not has_gradient and not (has_moved and memory ** len(rates) < 1e-20):  # by weight decay
        found = f"gradients of 0 in all {len(rates)} steps"
        fix = "check whether scores or answers of a pair differ, and that the loss counts tokens"
    elif not has_moved:
        found = f"no weight that {len(rates)} steps have moved, at rates up to {max(rates):g}"
        fix = f"raise {place}.optimizer.learning_rate, or lower its warmup_fraction"
    else:
        return
    raise StageError(f"{place}: found {found}, expected something to learn. Fix: {fix}")


def trained_digest(engine: DeepSpeedEngine, world: World) -> int:
    """The digest of the fp32 weights that train; shards do not change it."""
    shards = pieces(engine, fp32_shards(engine))
    found = [digest(piece, start) for _, start, piece in shards]
    own = torch.tensor(found, dtype=torch.int64).sum()  # a rank may have none
    return int(world.sum(own) if engine.zero_optimization_stage() else own)


@torch.no_grad()
def digest(tensor: Tensor, start: int = 0) -> int:
    """The sum over i of (2 (start + i) + 1) bits_i modulo 2^64: odd, so that any flip shows."""
    bits = tensor.detach().reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(2**20):  # the numbers of its int64 take 8 MiB
        end = start + len(part)
        factors = torch.arange(2 * start + 1, 2 * end + 1, 2, device=bits.device)
        total, start = total + factors.mul_(part).sum(), end
    heartbeat.report_progress()
    return int(total)
