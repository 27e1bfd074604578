"""The text of PPO's language-model loss (PPO-ptx): the blocks of each update of the actor."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.distributed.batches import Rows, load_rows, own_share, step_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.sequences import Sequences
from rlhf_pipeline.runtime.job import LaunchedJob

STREAM = 2**31
"""Stream of the blocks' permutations, different from that of the prompts."""


@dataclass(frozen=True)
class TextBatches:
    """Blocks of plain text, one batch for each update of the actor.

    The n-th update of a run always takes the n-th batch, whether or not training was resumed.
    """

    blocks: Rows
    """Column `input_ids`: token lists of equal length, at least 2."""
    config: PPOConfig
    world: World
    seed: int

    def of_step(self, step: int) -> Iterator[Sequences]:
        """This rank's share of the batch of each update in `step` (from 1), read lazily.

        Steps of the critic's warm-up have no update of the actor and no batch. If `kl.stop_update`
        skips an update, its batch is skipped, too.
        """
        updates = self.config.ppo_epochs * self.config.updates_per_epoch
        first = (step - 1 - self.config.critic_warmup_steps) * updates
        for number in range(first, first + updates):
            yield self.batch(number)

    def batch(self, number: int) -> Sequences:
        """This rank's share of global batch `number` (from 0).

        The first token of a block is the prompt, the others are the response.
        """
        assert self.config.ptx is not None
        rows = step_rows(
            self.blocks.num_rows, self.config.ptx.batch_size, number, self.seed, stream=STREAM
        )
        ids = torch.tensor(self.blocks.columns(own_share(rows, self.world))["input_ids"])
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Sequences(ids[:, :1], mask[:, :1], ids[:, 1:], mask[:, 1:])


def load_text(job: LaunchedJob, config: PPOConfig, world: World) -> TextBatches | None:
    """The text for `ppo.ptx`, or None if it is off.

    Raises ArtifactError if `ppo.ptx` is set, but the job has no text.
    """
    if config.ptx is None:
        return None
    if "pretraining" not in job.inputs:
        raise ArtifactError(
            "ppo.ptx: the split has no plain text. Fix: set split.pretraining and run stage split, "
            "or set ppo.ptx to null"
        )
    return TextBatches(
        load_rows(job.inputs["pretraining"] / "train.arrow", world), config, world, job.seed
    )
