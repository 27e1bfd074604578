"""Parquet files, and folders that datasets' `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_pipeline.data.files.location import reaching
from rlhf_pipeline.data.files.stream import Stream
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.redaction import without_secrets

_BATCH_ROWS = 1_000


def parquet_rows(stream: Stream, columns: Sequence[str]) -> Iterator[tuple[int, Row | Unused]]:
    """Number, from 1, and row of a Parquet file."""
    file = pq.ParquetFile(stream)
    yield from _numbered(
        file.iter_batches(_BATCH_ROWS, columns=_wanted(columns, file.schema_arrow.names))
    )


def saved_rows(
    folder: str, columns: Sequence[str], split: str
) -> Iterator[tuple[int, Row | Unused]]:
    """Number, from 1, and row of a saved Dataset, or of one split of a saved DatasetDict."""
    import datasets  # takes a second to import, and only such folders need it

    with reaching(folder):
        saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            shown = without_secrets(folder)
            raise DataError(
                f"{shown}: no split {split!r}. Set the source's `split` to one of {', '.join(saved)}."
            )
        saved = saved[split]
    wanted = _wanted(columns, saved.column_names)
    yield from _numbered(
        table.select(wanted) for table in saved.with_format("arrow").iter(_BATCH_ROWS)
    )


def _wanted(columns: Sequence[str], names: list[str]) -> list[str]:
    """Those of the file's columns that are asked for: as they are, or as the first part of a dotted path."""
    asked = {*columns, *(column.partition(".")[0] for column in columns)}
    return [name for name in names if not asked or name in asked]


def _numbered(batches: Iterator[pa.RecordBatch | pa.Table]) -> Iterator[tuple[int, Row | Unused]]:
    number = 0
    for batch in batches:
        for row in _rows(batch):
            number += 1
            yield number, row


def _rows(batch: pa.RecordBatch | pa.Table) -> list[Row | Unused]:
    try:
        batch.validate(
            full=True
        )  # Arrow trusts its files; converting what is damaged would end the process
        return batch.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError):
        if batch.num_rows == 1:
            return [Unused("a value that is not valid, such as text that is not UTF-8")]
        return [row for index in range(batch.num_rows) for row in _rows(batch.slice(index, 1))]
