"""The prompts of training: in which order they come, and which are left out for a while.

The stream has permutations of all prompts, one pass after the other. Every rank knows the same, so
that all of them draw the same prompts.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_pipeline.config.ppo_blocks import CurriculumConfig
from rlhf_pipeline.distributed.batches import rows_at

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
