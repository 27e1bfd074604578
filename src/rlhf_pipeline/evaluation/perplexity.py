"""Perplexity of held-out human answers: what training for the judge costs (alignment tax)."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from rlhf_pipeline.distributed.batches import Rows, even_share, sampled_rows
from rlhf_pipeline.evaluation.setup import Setup, logprobs
from rlhf_pipeline.models.sequences import Sequences, collate, pad


@dataclass(frozen=True)
class HumanAnswers:
    """Demonstrations that no policy was trained on, the rows of this rank."""

    rows: np.ndarray
    """Their numbers in the table; the last one may repeat the first of all."""
    sequences: Sequences
    learned: Tensor
    """(B, R) bool: the tokens that the loss of SFT includes."""


def human_answers(folder: Path, setup: Setup) -> HumanAnswers | None:
    """At most `evaluate.prompts` validation rows of SFT; None if there are fewer than ranks."""
    table = Rows.read(folder / "validation.arrow")
    if table.num_rows < setup.world.size:
        return None
    chosen = sampled_rows(table.num_rows, setup.config.prompts, setup.seed)
    rows = even_share(chosen, setup.world)
    columns = table.columns(rows)
    learned, _ = pad(columns["loss_mask"], False, left=False)
    sequences = collate(columns["prompt_ids"], columns["response_ids"], setup.contract.pad_id)
    return HumanAnswers(rows, sequences, learned.bool())


def perplexity(policy: nn.Module, human: HumanAnswers, setup: Setup) -> float:
    """exp of the mean negative log-likelihood per token, as `validation/perplexity` of SFT."""
    found = logprobs(policy, human.sequences, setup, temperature=1.0)
    losses = -found.where(human.learned, 0.0).double().sum(1)
    own = zip(human.rows.tolist(), losses.tolist(), human.learned.sum(1).tolist(), strict=True)
    rows = {row: (loss, n) for part in setup.world.gather([*own]) for row, loss, n in part}
    total, tokens = (sum(values) for values in zip(*rows.values(), strict=True))
    return math.exp(min(total / tokens, 700.0))
