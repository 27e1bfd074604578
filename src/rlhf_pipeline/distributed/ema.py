"""An exponential moving average of the weights that an engine trains.

    mean <- decay * mean + (1 - decay) * weights          after every optimizer step, in fp32

Each rank averages the shard that its optimizer holds, so averaging needs no communication and no
memory beyond that of the shard.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_pipeline.distributed.lean_deepspeed import DeepSpeedEngine
from rlhf_pipeline.distributed.zero import fp32_shards, spread_fp32_shards


class EMA:
    """The average of one engine's weights; it starts at the present weights."""

    def __init__(self, engine: DeepSpeedEngine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self.shards = [shard.detach().clone() for shard in fp32_shards(engine)]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average; call it after each optimizer step."""
        for mean, shard in zip(self.shards, fp32_shards(self._engine), strict=True):
            mean.lerp_(shard, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[DeepSpeedEngine]:
        """Swap the average into the engine; on exit, restore its own weights bit for bit.

        All ranks enter and exit together. Take no optimizer step inside the block.
        """
        self._swap()
        try:
            yield self._engine
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, shard in zip(self.shards, fp32_shards(self._engine), strict=True):
            own = shard.clone()
            shard.copy_(mean)
            mean.copy_(own)
        spread_fp32_shards(self._engine)
