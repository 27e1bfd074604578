"""The text of PPO's language-model loss (ptx): which blocks each update of the actor takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.batches import columns, load_rows, own_share, step_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime.job import LaunchedJob

STREAM = 2**31
"""The blocks' stream of permutations: unlike the prompts', and unlike the number of any response that is drawn."""


@dataclass(frozen=True)
class TextBatches:
    """Blocks of plain text, one batch for each update of the actor: its n-th update takes the n-th batch, always."""

    blocks: pa.Table
    """Column `input_ids`: token lists of one length, at least 2."""
    config: PPOConfig
    world: World
    seed: int

    def of_step(self, step: int) -> Iterator[Sequences]:
        """This rank's share of the batch of each update in `step` (from 1), read when it is asked for.

        Steps of the critic's warm-up have no update of the actor, and no batch. A batch of an update that `kl.stop_update`
        leaves out is left out with it.
        """
        updates = self.config.ppo_epochs * self.config.updates_per_epoch
        first = (step - 1 - self.config.critic_warmup_steps) * updates
        for number in range(first, first + updates):
            yield self.batch(number)

    def batch(self, number: int) -> Sequences:
        """This rank's share of global batch `number` (from 0). Each block's first token is the prompt of the others."""
        assert self.config.ptx is not None
        rows = step_rows(
            self.blocks.num_rows, self.config.ptx.batch_size, number, self.seed, stream=STREAM
        )
        ids = torch.tensor(columns(self.blocks, own_share(rows, self.world))["input_ids"])
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Sequences(ids[:, :1], mask[:, :1], ids[:, 1:], mask[:, 1:])


def load_text(job: LaunchedJob, config: PPOConfig, world: World) -> TextBatches | None:
    """The job's text, or None where `ppo.ptx` is off; raise `ArtifactError` where it is on and the job has none."""
    if config.ptx is None:
        return None
    if "pretraining" not in job.inputs:
        raise ArtifactError(
            "ppo.ptx is set, but the job has no input `pretraining`; set split.pretraining and run split, or set ppo.ptx to "
            "null"
        )
    return TextBatches(
        load_rows(job.inputs["pretraining"] / "train.arrow", world), config, world, job.seed
    )
