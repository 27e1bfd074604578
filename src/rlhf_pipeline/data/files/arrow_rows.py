"""Read Parquet files, and folders written by `save_to_disk` of the datasets library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_pipeline.data.files.location import explain_store_errors
from rlhf_pipeline.data.files.stream import Stream
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.adapter import Row
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.redaction import without_secrets

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 1_000


def parquet_rows(stream: Stream, columns: Sequence[str]) -> Iterator[tuple[int, Row | Unused]]:
    """Yield the rows of a Parquet file, numbered from 1."""
    file = pq.ParquetFile(stream)
    yield from _number_rows(
        file.iter_batches(_BATCH_ROWS, columns=_requested_columns(columns, file.schema_arrow.names))
    )


def saved_rows(
    folder: str, columns: Sequence[str], split: str
) -> Iterator[tuple[int, Row | Unused]]:
    """Yield the rows, numbered from 1, of a saved Dataset or of one split of a DatasetDict."""
    import datasets  # imported late: the import takes a second

    with explain_store_errors(folder):
        saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            shown = without_secrets(folder)
            raise DataError(
                f"{shown}: split {split!r} not found. Fix: set the source's `split` to one of: "
                f"{', '.join(saved)}."
            )
        saved = saved[split]
    yield from data_set_rows(saved, _requested_columns(columns, saved.column_names))


def data_set_rows(
    data_set: datasets.Dataset, columns: list[str]
) -> Iterator[tuple[int, Row | Unused]]:
    """Yield these columns of every row of a data set, numbered from 1."""
    chosen = data_set.select_columns(columns).with_format("arrow")
    yield from _number_rows(chosen.iter(_BATCH_ROWS))


def _requested_columns(columns: Sequence[str], names: list[str]) -> list[str]:
    """The file's columns that are requested, directly or as the start of a dotted path.

    All columns if a requested one is missing: the message about it lists them.
    """
    starts = {column: column.partition(".")[0] for column in columns}
    if any(column not in names and start not in names for column, start in starts.items()):
        return names
    requested = {*starts, *starts.values()}
    return [name for name in names if not requested or name in requested]


def _number_rows(
    batches: Iterable[pa.RecordBatch | pa.Table],
) -> Iterator[tuple[int, Row | Unused]]:
    return enumerate(chain.from_iterable(map(_rows_of_batch, batches)), start=1)


def _rows_of_batch(batch: pa.RecordBatch | pa.Table) -> list[Row | Unused]:
    try:
        batch.validate(full=True)  # converting a damaged batch would crash the process
        return batch.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError):
        if batch.num_rows == 1:
            return [Unused("a value that is not valid, such as text that is not UTF-8")]
        return [
            row for index in range(batch.num_rows) for row in _rows_of_batch(batch.slice(index, 1))
        ]
