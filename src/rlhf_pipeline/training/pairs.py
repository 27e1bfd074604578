"""Comparisons, as the reward model and DPO train on them: two answers to each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pipeline.models.sequences import Sequences, collate
from rlhf_pipeline.training.supervised import Sums


@dataclass(frozen=True)
class Pairs:
    """Comparisons: two answers to each prompt, read in one forward pass."""

    answers: Sequences
    """Row 2i is the chosen answer of pair i, row 2i + 1 the rejected one."""

    @classmethod
    def collate(cls, rows: dict[str, list[Any]], pad_id: int) -> Pairs:
        """Columns `prompt_ids`, `chosen_ids` and `rejected_ids` of a prepared table."""
        prompts = [ids for ids in rows["prompt_ids"] for _ in range(2)]
        answers = [
            ids
            for pair in zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)
            for ids in pair
        ]
        return cls(collate(prompts, answers, pad_id))

    def __len__(self) -> int:
        return len(self.answers) // 2

    @property
    def lengths(self) -> Tensor:
        """(N,) real tokens of the longer answer's row."""
        return self.answers.lengths.view(-1, 2).amax(1)

    def rows(self, index: Tensor) -> Pairs:
        """The chosen pairs."""
        return Pairs(self.answers.rows(torch.stack([2 * index, 2 * index + 1], dim=1).flatten()))

    def to(self, device: torch.device) -> Pairs:
        """The same pairs on another device."""
        return Pairs(self.answers.to(device))


def chosen_and_rejected(values: Tensor) -> tuple[Tensor, Tensor]:
    """A number for each of the answers of `Pairs`, (2N,), as those of the chosen and of the rejected, (N,) each."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def ranking_sums(chosen: Tensor, rejected: Tensor) -> Sums:
    """Additive sums of how two scores, (N,) each, rank the answers: pairs, those ranked as preferred, and margins.

    A tie counts half: a model that cannot tell the answers apart has the accuracy of a coin.
    """
    margin = (chosen - rejected).detach().double()
    return {
        "pairs": torch.tensor(float(len(chosen)), device=chosen.device),
        "correct": (margin > 0).sum() + 0.5 * (margin == 0).sum(),
        "margin": margin.sum(),
        "chosen": chosen.detach().double().sum(),
    }
