"""Weights in few numbers: digests of frozen ones, and how far trained ones move; none is copied."""

from collections.abc import Mapping, Sequence
from statistics import mode
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.distributed.zero import DeepSpeedEngine, fp32_shards, pieces
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat

SIZE = 2**20  # numbers that are processed together
WIDTH = 256  # of a sketch: the error of a distance is 4% (one over the root of 2 * WIDTH)
UNIT = 2.0**-44  # of the numbers in a sketch: finer than float32, but for weights below 5e-7
MIX = -7046029254386353131  # 2^64 divided by the golden ratio: Knuth's multiplicative hash


class FrozenWeights:
    """The weights of models that no step may change, equal on all ranks unless they are sharded."""

    def __init__(self, models: Mapping[str, nn.Module], world: World) -> None:
        self._weights = {
            weight: f"{model}: {name}"
            for model, module in models.items()
            for name, weight in module.named_parameters()
            if not weight.requires_grad
        }
        self._world, self._start = world, self._digests()
        whole = [name for weight, name in self._weights.items() if not hasattr(weight, "ds_tensor")]
        ranks = world.gather({name: self._start[name] for name in whole})
        usual = {name: mode(own[name] for own in ranks) for name in whole}
        different = [[name for name in whole if own[name] != usual[name]] for own in ranks]
        _refuse(different, "the other ranks do not have")

    def check(self) -> None:
        """Raise StageError, as the constructor does, if a bit differs: here, from the start."""
        changed = [name for name, now in self._digests().items() if now != self._start[name]]
        _refuse(self._world.gather(changed), "it did not have at the start")

    def _digests(self) -> dict[str, int]:  # of a rank's shards from ZeRO-3 on
        return {name: digest(getattr(x, "ds_tensor", x)) for x, name in self._weights.items()}


def _refuse(faults: Sequence[Sequence[str]], which: str) -> None:
    """Raise StageError if a rank, in their order, has faulty weights."""
    for rank, names in enumerate(faults):
        if names:
            raise StageError(
                f"{names[0]}: found bits on rank {rank} that {which} ({len(names)} tensors), "
                "expected frozen weights. Fix: run the same command again; if it recurs, leave out "
                "that GPU or machine, whose memory may be faulty"
            )


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """The sum over i of (2 i + 1) * bits_i modulo 2^64: as factors are odd, a flipped bit shows."""
    bits = tensor.detach().reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(SIZE)):
        first = 2 * SIZE * number + 1
        total += (torch.arange(first, first + 2 * len(part), 2, device=bits.device) * part).sum()
    heartbeat.report_progress()
    return int(total)


@torch.no_grad()
def sketch(engine: DeepSpeedEngine, world: World) -> list[int]:
    """WIDTH numbers for the fp32 weights that train, which give their `distance` at two times.

    A count sketch (Charikar et al. 2002): each weight is added with a pseudo-random sign to one of
    the numbers, in integer units, whose sums depend on neither order nor shards.
    """
    total = torch.zeros(WIDTH, dtype=torch.int64, device=world.device)
    for name, start, piece in pieces(engine, fp32_shards(engine)):
        for part in piece.detach().split(SIZE):
            places = torch.arange(start, start + len(part), device=part.device)
            mixed = (places + (crc32(name.encode()) << 30)) * MIX
            units = (part.double() / UNIT).round().long()
            units = torch.where((mixed ^ (mixed >> 31)) * MIX < 0, -units, units)
            units = pad(units, (start % WIDTH, -(start + len(part)) % WIDTH))
            total += units.view(-1, WIDTH).sum(0).to(total.device)
            start += len(part)
        heartbeat.report_progress()
    # At stage 0, every rank has all weights.
    return (world.sum(total) if engine.zero_optimization_stage() else total).tolist()


def distance(sketched: Sequence[int], other: Sequence[int]) -> float:
    """The Euclidean distance of the weights of two sketches, an estimate; 0 is exact."""
    wrapped = np.array(sketched) - np.array(other)  # modulo 2^64, as the sums are
    return float(np.linalg.norm(wrapped.astype(float))) * UNIT
