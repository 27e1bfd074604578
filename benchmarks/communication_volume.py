"""What data-parallel training sends over the network: bytes and seconds, by ZeRO stage.

The volumes are those of ring collectives (Patarasuk and Yuan 2009), as NCCL and Gloo use them for
large tensors; which collectives run is read in DeepSpeed 0.19 and differs from the ZeRO paper
(Rajbhandari et al. 2020, section 7) at stages 1 and 2. `benchmarks/communication.py` checks both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from rlhf_pipeline.config.training import BUCKET, LIVE


@dataclass(frozen=True)
class Link:
    """How a rank reaches the next rank of the ring."""

    bandwidth: float
    """Bytes a second in one direction."""
    latency: float
    """Seconds that one message takes beside its transfer."""


@dataclass(frozen=True)
class Collectives:
    """Equal ring collectives over all ranks."""

    rounds: int
    """Times that the ring is passed: 2 for an all-reduce, 1 for an all-gather or reduce-scatter."""
    size: float
    """Bytes of the whole tensor."""
    count: float = 1.0

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends, which are as many as it receives."""
        return self.count * self.rounds * self.size * (ranks - 1) / ranks

    def seconds(self, ranks: int, link: Link) -> float:
        """Seconds, if nothing else uses the links.

        Each rank sends its chunk in two halves, so that one is on the way while the other is
        reduced. Either the link is always busy, or each half waits for the latency of each hop.
        """
        if ranks == 1:
            return 0.0
        hops, half = ranks - 1, self.size / ranks / 2 / link.bandwidth
        busy = hops * 2 * half + link.latency
        waiting = hops * (half + link.latency) + half
        return self.count * self.rounds * max(busy, waiting)


def training_step(
    parameters: int,
    stage: int,
    *,
    micro_batches: int = 1,
    width: int = 2,
    layer: int = 0,
    reduce_rounds: int = 1,
    bucket: int = BUCKET,
    live: int = LIVE,
) -> list[Collectives]:
    """The collectives of one optimizer step.

    Stage 0 reduces gradients once in a step. Stages 1 and 2 reduce them by an all-reduce, too,
    although each rank needs its share only, and gather the weights after the step; stage 2 reduces
    the gradients of every micro batch. Stage 3 gathers the weights in the forward and the backward
    pass of every micro batch, and reduces and scatters its gradients.

    Args:
        parameters: weights of the model, all of which train.
        stage: 0 to 3.
        width: bytes of a weight and of a gradient.
        layer: weights of a transformer layer that is computed again in the backward pass (gradient
            checkpointing); 0: none is. Stage 3 gathers again what exceeds `live`.
        reduce_rounds: of a reduce-scatter: 1 with NCCL, 2 with Gloo, which runs an all-reduce.
        bucket: elements in one collective.
        live: weights that stage 3 keeps from one use to the next.
    """
    size = parameters * width
    if stage < 3:
        reductions = micro_batches if stage == 2 else 1
        reduced = _in_buckets(2, size, bucket * width, reductions)
        return [reduced] if stage == 0 else [reduced, Collectives(1, size)]
    kept = min(live, parameters)
    again = parameters - kept + (parameters * max(0.0, 1 - live / layer) if layer else 0.0)
    return [
        _in_buckets(1, size, bucket * width, micro_batches),
        _in_buckets(1, again * width, bucket * width, micro_batches),
        _in_buckets(reduce_rounds, size, bucket * width, micro_batches),
    ]


def gathered(
    parameters: int, *, passes: int = 1, width: int = 2, bucket: int = BUCKET
) -> Collectives:
    """All weights of a stage-3 model, gathered for a rollout or for forward passes."""
    return _in_buckets(1, parameters * width, bucket * width, passes)


def total_sent(collectives: Iterable[Collectives], ranks: int) -> float:
    """Bytes that each rank sends in all of them."""
    return sum(each.sent(ranks) for each in collectives)


def total_seconds(collectives: Iterable[Collectives], ranks: int, link: Link) -> float:
    """Seconds of all of them, one after another."""
    return sum(each.seconds(ranks, link) for each in collectives)


def _in_buckets(rounds: int, size: float, bucket: int, times: int) -> Collectives:
    count = max(1, ceil(size / bucket))
    return Collectives(rounds, size / count, count * times)
