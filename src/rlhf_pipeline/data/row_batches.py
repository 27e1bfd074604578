"""Batches of the rows that the prepared files need, without unneeded answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.blend import Blend
from rlhf_pipeline.data.record_files import ExampleBatch, example_batch
from rlhf_pipeline.data.tables import TABLES


@dataclass(frozen=True)
class Batch:
    """Rows of one source, and the files that they belong to."""

    source: int
    numbers: np.ndarray
    """Positions of the rows in the blend."""
    examples: ExampleBatch
    """The examples; answers that no file needs are None."""
    chosen: dict[str, np.ndarray]
    """For each file: (rows,) bool, the rows that it contains."""
    turns: list[bool] | None
    """The rows whose earlier assistant turns SFT learns; None: none."""


def needed_batches(
    config: SplitConfig, tables: Sequence[pa.Table], plan: Blend, rows: dict[str, np.ndarray]
) -> Iterator[Batch]:
    """Yield the rows that a file needs, in the order of the sources.

    `rows` maps each file to its rows: (N,) bool.
    """
    needed = np.logical_or.reduce(list(rows.values()))
    for source, table in enumerate(tables):
        start = plan.starts[source]
        for records in table.to_batches():
            numbers = start + np.flatnonzero(needed[start : start + len(records)])
            batch = example_batch(records.take(pa.array(numbers - start)))
            start += len(records)
            if len(numbers):
                chosen = {path: mask[numbers] for path, mask in rows.items()}
                sft = np.logical_or.reduce(
                    [chosen[table.path] for table in TABLES if table.phase == "sft"]
                )
                turns = sft.tolist() if config.sft_loss == "assistant" else None
                yield Batch(
                    source, numbers, _without_unneeded_answers(batch, chosen), chosen, turns
                )


def _without_unneeded_answers(batch: ExampleBatch, chosen: dict[str, np.ndarray]) -> ExampleBatch:
    def only(answer: str, values: list[str | None]) -> list[str | None]:
        wanted = np.logical_or.reduce(
            [chosen[table.path] for table in TABLES if answer in table.answers]
        )
        return [
            value if want else None for value, want in zip(values, wanted.tolist(), strict=True)
        ]

    return replace(
        batch, chosen=only("chosen", batch.chosen), rejected=only("rejected", batch.rejected)
    )
