"""Perplexity of held-out answers of SFT's data: what training for the judge costs."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from rlhf_pipeline.distributed.batches import Rows, even_share, sampled_rows
from rlhf_pipeline.evaluation.setup import Setup, logprobs
from rlhf_pipeline.models.sequences import Sequences, collate, pad


@dataclass(frozen=True)
class HeldOut:
    """Answers of SFT's data that no policy was trained on, the rows of this rank."""

    rows: np.ndarray
    """Their numbers in the table; the last one may repeat the first of all."""
    sequences: Sequences
    learned: Tensor
    """(B, R) bool: the tokens that the loss of SFT includes."""


def held_out_answers(folder: Path, setup: Setup) -> HeldOut | None:
    """At most `evaluate.prompts` validation rows of SFT; None if there are fewer than ranks."""
    table = Rows.read(folder / "validation.arrow")
    if table.num_rows < setup.world.size:
        return None
    chosen = sampled_rows(table.num_rows, setup.config.prompts, setup.seed)
    rows = even_share(chosen, setup.world)
    columns = table.columns(rows)
    learned, _ = pad(columns["loss_mask"], False, left=False)
    sequences = collate(columns["prompt_ids"], columns["response_ids"], setup.contract.pad_id)
    return HeldOut(rows, sequences, learned.bool())


def perplexity(policy: nn.Module, held_out: HeldOut, setup: Setup) -> float:
    """exp of the mean negative log-likelihood per token, as `validation/perplexity` of SFT."""
    found = logprobs(policy, held_out.sequences, setup, temperature=1.0)
    losses = -found.where(held_out.learned, 0.0).double().sum(1)
    numbers, counts = held_out.rows.tolist(), held_out.learned.sum(1).tolist()
    own = zip(numbers, losses.tolist(), counts, strict=True)
    rows = {row: (loss, n) for part in setup.world.gather([*own]) for row, loss, n in part}
    total, tokens = (sum(values) for values in zip(*rows.values(), strict=True))
    return math.exp(min(total / tokens, 700.0))
