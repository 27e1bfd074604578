"""Prompts with their responses as one rectangular batch.

Shapes: B sequences, P prompt tokens (left-padded), R response tokens (right-padded). Masks: True =
the token counts. All responses begin at the same column, so a model computes R columns of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhf_pipeline.rl.logprobs import position_ids


@dataclass(frozen=True)
class Packed:
    """The N real tokens of a batch, M of them in responses, as one row; its rows follow each other.

    A row that shares the prompt of an earlier row has its response tokens only, which attend to the
    prompt there. Each response has a prompt of at least one token.
    """

    ids: Tensor  # (1, N) long
    positions: Tensor  # (1, N) long, the position of each token in its own row
    lengths: tuple[int, ...]  # tokens of each row
    borders: Tensor  # (B + 1,) int32: the number of tokens before each row, and of all
    seen: Tensor | None
    """(K,) long: where the tokens are that each row attends to, row by row. None: its own ones."""
    seen_lengths: tuple[int, ...]  # tokens that each row attends to
    seen_borders: Tensor  # (B + 1,) int32, like `borders`
    before_response: Tensor  # (M,) long: where the token before each response token is
    ends: Tensor  # (B,) long: where the last token of each row is
    response_ids: Tensor  # (1, M) long

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments of a forward pass with the attention of `models.packing`.

        That attention reads no mask. A mask of four dimensions keeps transformers from making one,
        for which it would wait for the device.
        """
        return {
            "input_ids": self.ids,
            "attention_mask": self.ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
            "position_ids": self.positions,
            "packed_rows": self,
        }

    def to(self, device: torch.device) -> "Packed":
        """Copy the tokens to a device; the host does not wait for the copy."""
        moved: Packed = _moved(self, device)
        return moved


@dataclass(frozen=True)
class Sequences:
    """A batch of prompts, each followed by its response.

    The model also reads tokens of a response that the policy did not choose, such as a later turn
    of the user, but no loss, KL or advantage counts them.
    """

    prompt_ids: Tensor  # (B, P) long
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, R) long
    real_mask: Tensor  # (B, R) bool: tokens that exist, the EOS that ends a response among them
    action_mask: Tensor  # (B, R) bool: those of them that the policy chose
    prompt_numbers: Tensor | None = None  # (B,) long: rows with equal numbers share a prompt
    packed_on_device: Packed | None = None  # the result of `packed` if the batch is on a device

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """Number of real tokens of each prompt and response, (B, 1, 2)."""
        return torch.stack([self.prompt_mask.sum(1), self.real_mask.sum(1)], dim=1)[:, None]

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the arguments of a Hugging Face forward pass, (B, P + R) each."""
        # Models that count columns (GPT-2) would shift the positions by left padding.
        attention_mask = torch.cat([self.prompt_mask, self.real_mask], dim=1)
        return {
            "input_ids": torch.cat([self.prompt_ids, self.response_ids], dim=1),
            "attention_mask": attention_mask.long(),
            "position_ids": position_ids(attention_mask),
        }

    def packed(self) -> Packed:
        """The same rows without padding; `to` packs before, so that the host need not wait."""
        if self.packed_on_device is not None:
            return self.packed_on_device
        real = torch.cat([self.prompt_mask, self.real_mask], dim=1)
        ids = torch.cat([self.prompt_ids, self.response_ids], dim=1)
        width, rows = self.prompt_ids.shape[1], torch.arange(len(self))
        owner = rows  # the row whose prompt each row uses: the first one with the same
        if self.prompt_numbers is not None:
            number = torch.unique(self.prompt_numbers, return_inverse=True)[1]
            first = torch.full_like(rows, len(rows)).scatter_reduce(0, number, rows, "amin")
            owner = torch.where(self.real_mask.any(1), first[number], rows)  # else its own
        present = real.clone()
        present[owner < rows, :width] = False
        place = (present.flatten().cumsum(0) - 1).view(present.shape)
        place[:, :width] = place[owner, :width]
        lengths, seen_lengths = present.sum(1), real.sum(1)
        last = width - 1 + self.real_mask.sum(1)
        return Packed(
            ids=ids[present][None],
            positions=position_ids(real)[present][None],
            lengths=tuple(lengths.tolist()),
            borders=nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
            seen=None if torch.equal(owner, rows) else place[real],
            seen_lengths=tuple(seen_lengths.tolist()),
            seen_borders=nn.functional.pad(seen_lengths.cumsum(0), (1, 0)).int(),
            before_response=place[:, width - 1 : -1][self.real_mask],
            ends=place[rows, last],
            response_ids=self.response_ids[self.real_mask][None],
        )

    def rows(self, index: Tensor) -> "Sequences":
        """Select rows, and drop the columns that are padding in all of them."""
        prompt_mask, real_mask = self.prompt_mask[index], self.real_mask[index]
        prompt = slice(self.prompt_ids.shape[1] - int(prompt_mask.sum(1).max()), None)
        response = slice(0, int(real_mask.sum(1).max()))
        return Sequences(
            self.prompt_ids[index][:, prompt],
            prompt_mask[:, prompt],
            self.response_ids[index][:, response],
            real_mask[:, response],
            self.action_mask[index][:, response],
            None if self.prompt_numbers is None else self.prompt_numbers[index],
        )

    def joined(self, other: "Sequences") -> "Sequences":
        """The rows of both, those of `other` last; `rows` drops columns that are only padding."""
        more: Any = {
            name: wide(x, getattr(other, name), left=name.startswith("prompt"))
            for name, x in tensors(self).items()
        }
        return replace(self, **more, packed_on_device=None)

    def to(self, device: torch.device) -> "Sequences":
        """Copy the batch from main memory to a device; the host does not wait for the copy."""
        moved: Sequences = _moved(self, device)
        return replace(moved, packed_on_device=self.packed().to(device))


def _moved(record: Any, device: torch.device) -> Any:
    moved = {name: x.to(device, non_blocking=True) for name, x in tensors(record).items()}
    return replace(record, **moved)


def tensors(record: object) -> dict[str, Tensor]:
    """The fields of a record that are tensors."""
    return {name: x for name, x in vars(record).items() if isinstance(x, Tensor)}


def wide(first: Tensor, second: Tensor, *, left: bool = False) -> Tensor:
    """The rows of both, (B,) or (B, T); the narrower one is padded with 0 on the left or right."""
    if first.dim() == 1:
        return torch.cat([first, second])
    width = max(first.shape[1], second.shape[1])
    gaps = (width - first.shape[1], width - second.shape[1])
    sides = [(gap, 0) if left else (0, gap) for gap in gaps]
    return torch.cat([nn.functional.pad(first, sides[0]), nn.functional.pad(second, sides[1])])


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    *,
    actions: Sequence[Sequence[bool]] | None = None,
    prompt_numbers: Sequence[int] | None = None,
) -> Sequences:
    """Build a batch from token lists: prompts are padded on the left, responses on the right.

    Args:
        actions: for each token of a response, whether the policy chose it. None: all of them.
        prompt_numbers: equal numbers mark rows that share a prompt, which is then read once. Equal
            tokens are no evidence: they may stand for different images.
    """
    prompt_ids, prompt_mask = pad(prompts, pad_id, left=True)
    response_ids, real_mask = pad(responses, pad_id, left=False)
    action_mask = real_mask if actions is None else pad(actions, False, left=False)[0].bool()
    numbers = None if prompt_numbers is None else torch.tensor(prompt_numbers)
    return Sequences(prompt_ids, prompt_mask, response_ids, real_mask, action_mask, numbers)


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Build ids (B, T) and mask (B, T) from token lists; T is the length of the longest one."""
    side, real = "left" if left else "right", [torch.ones(len(r), dtype=torch.bool) for r in rows]
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side=side),
        pad_sequence(real, batch_first=True, padding_side=side),
    )
