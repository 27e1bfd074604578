"""Prompts with their responses as one rectangular batch.

Shapes: B sequences, P prompt tokens (left-padded), R response tokens (right-padded). Masks: True = real token.
Prompt and response meet in one column, so the response's positions are the same in every row: a model computes logits
for those R columns only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pipeline.rl.logprobs import position_ids


@dataclass(frozen=True)
class Sequences:
    """A batch of prompts, each followed by its response."""

    prompt_ids: Tensor
    """(B, P) long."""
    prompt_mask: Tensor
    """(B, P) bool."""
    response_ids: Tensor
    """(B, R) long."""
    response_mask: Tensor
    """(B, R) bool; the EOS token that ends a response is part of it."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """(B,) real tokens of each row."""
        return self.prompt_mask.sum(1) + self.response_mask.sum(1)

    def model_inputs(self) -> dict[str, Tensor]:
        """Arguments of a Hugging Face forward pass over prompt and response, (B, P + R) each.

        Positions come from the mask, always: left padding shifts them in models that count columns (GPT-2).
        """
        attention_mask = torch.cat([self.prompt_mask, self.response_mask], dim=1)
        return {
            "input_ids": torch.cat([self.prompt_ids, self.response_ids], dim=1),
            "attention_mask": attention_mask.long(),
            "position_ids": position_ids(attention_mask),
        }

    def rows(self, index: Tensor) -> Sequences:
        """The chosen rows, without the columns that are padding in all of them."""
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        prompt = slice(self.prompt_ids.shape[1] - int(prompt_mask.sum(1).max()), None)
        response = slice(0, int(response_mask.sum(1).max()))
        return Sequences(
            self.prompt_ids[index][:, prompt],
            prompt_mask[:, prompt],
            self.response_ids[index][:, response],
            response_mask[:, response],
        )

    def to(self, device: torch.device) -> Sequences:
        """The same batch on another device."""
        return Sequences(
            self.prompt_ids.to(device),
            self.prompt_mask.to(device),
            self.response_ids.to(device),
            self.response_mask.to(device),
        )


def collate(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> Sequences:
    """Token lists, one prompt and one response a row, as a batch: prompts padded on the left, responses on the right."""
    prompt_ids, prompt_mask = pad(prompts, pad_id, left=True)
    response_ids, response_mask = pad(responses, pad_id, left=False)
    return Sequences(prompt_ids, prompt_mask, response_ids, response_mask)


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Token lists as ids (B, T) and mask (B, T), T the longest row."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, columns] = torch.tensor(row, dtype=torch.long)
        mask[i, columns] = True
    return ids, mask


def micro_batches(lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Row numbers in groups of at most `size`, rows of like length together, so that little padding is computed.

    The number of groups depends on the number of rows alone: ranks with equally many rows stay in step.
    """
    yield from torch.argsort(lengths, stable=True).split(size)
