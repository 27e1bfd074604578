"""What each step of PPO trains on: prompts, in which order, and further rows beside responses.

The streams are seeded permutations, one pass after the other. Every rank knows the same, so that
all of them draw the same rows. A step draws G prompts and samples K responses to each. Slot g is
the place of its g-th prompt; with `equal_groups: resample`, another prompt may take the place.

    stream    p0  p1  p2  p3  p4  p5  |  p6 ...        step 1 draws G = 6 prompts, step 2 the next
    slot       0   1   2   3   4   5
    rank       0   1   0   1   0   1                   slot g is on rank g mod W, here W = 2

    rows of rank 0, K = 2:  p0 p2 p4   p0 p2 p4        the first responses, then the second ones
    rows of rank 1, K = 2:  p1 p3 p5   p1 p3 p5        as (K, G / W), a column is a prompt's group

The (K, G) is that of TRL's first RLOO trainer. The seed of a response is made of its step, slot and
number among the K, so the responses are the same for any number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_pipeline.config.ppo import CurriculumConfig, PPOConfig
from rlhf_pipeline.distributed.batches import Rows, own_share, rows_at, step_rows
from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.models.sequences import Sequences, collate

TEXT_STREAM = 2**31
"""Stream of the permutations of ptx's blocks, different from that of the prompts. Demonstrations
have the next one."""
CHUNK = 1024
"""Positions that are looked at together."""


class PromptStream:
    """Draws prompts; leaves out those that a curriculum excludes."""

    def __init__(self, count: int, seed: int, curriculum: CurriculumConfig | None) -> None:
        self.drawn = self.left_out = 0
        self._count, self._seed, self._curriculum = count, seed, curriculum
        self._returns: dict[int, int] = {}
        """For a prompt to leave out, the pass of the stream in which it returns."""

    def draw(self, size: int) -> np.ndarray:
        """The numbers of the next prompts. It ends, because a prompt returns after some passes."""
        chosen: list[int] = []
        while len(chosen) < size:
            ahead = size - len(chosen) if not self._returns else CHUNK
            positions = np.arange(self.drawn, self.drawn + ahead)
            for number in rows_at(positions, self._count, self._seed).tolist():
                is_out = self._returns.get(number, 0) > self.drawn // self._count
                self.drawn += 1
                self.left_out += is_out
                if not is_out:
                    chosen.append(number)
                if len(chosen) == size:
                    break
        return np.array(chosen)

    def record(self, shares: Mapping[int, float]) -> None:
        """Note the share of right responses to each prompt, of all ranks."""
        if self._curriculum is None:
            return
        present = (self.drawn - 1) // self._count  # the pass of the last prompt drawn
        for number, share in shares.items():
            self._returns.pop(number, None)
            if not self._curriculum.minimum < share < self._curriculum.maximum:
                self._returns[number] = present + 1 + self._curriculum.passes

    def state(self) -> dict[str, Any]:
        returns = sorted([number, when] for number, when in self._returns.items())
        return {"drawn": self.drawn, "left_out": self.left_out, "returns": returns}

    def restored(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.left_out = state["drawn"], state["left_out"]
        self._returns = dict(state["returns"])


@dataclass(frozen=True)
class FurtherRows:
    """Rows that train beside the responses: the n-th update of a run takes the n-th batch, resumed
    or not."""

    rows: Rows
    """Blocks of plain text (`input_ids`, equally long, at least 2 tokens), or demonstrations."""
    size: int  # rows of an update, over all ranks
    stream: int  # of the permutations, see `step_rows`
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
        return map(self.batch, range(first, first + updates))

    def batch(self, number: int) -> Sequences:
        """The share of batch `number` (from 0), with what SFT learns of demonstrations."""
        rows = step_rows(self.rows.num_rows, self.size, number, self.seed, stream=self.stream)
        own = self.rows.columns(own_share(rows, self.world))
        if (texts := own.get("input_ids")) is not None:  # the prompt is the first token
            return collate([ids[:1] for ids in texts], [ids[1:] for ids in texts], pad_id=0)
        return collate(own["prompt_ids"], own["response_ids"], 0, actions=own["loss_mask"])
