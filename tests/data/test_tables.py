from __future__ import annotations

import pyarrow as pa

from rlhf_pipeline.data.record_files import ArrowWriter

SCHEMA = pa.schema([("id", pa.string()), ("prompt_ids", pa.list_(pa.int32()))])


def write(path, *batches: list[dict]) -> bytes:
    writer = ArrowWriter(path, SCHEMA)
    for batch in batches:
        writer.write(batch)
    writer.close()
    return path.read_bytes()


def read(path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def test_batches_are_read_back_in_order(tmp_path) -> None:
    path = tmp_path / "ppo" / "train.arrow"
    first = [{"id": "a", "prompt_ids": [1, 2]}, {"id": "b", "prompt_ids": [], "more": 1}]
    write(path, first, [{"id": "c", "prompt_ids": [3]}])
    table = read(path)
    assert table.schema == SCHEMA
    assert table.to_pydict() == {"id": ["a", "b", "c"], "prompt_ids": [[1, 2], [], [3]]}


def test_equal_batches_are_equal_bytes(tmp_path) -> None:
    batch = [{"id": "a", "prompt_ids": [1, 2]}]
    assert write(tmp_path / "one.arrow", batch) == write(tmp_path / "other.arrow", batch)


def test_a_file_without_rows_has_its_columns(tmp_path) -> None:
    write(tmp_path / "none.arrow")
    assert read(tmp_path / "none.arrow").schema == SCHEMA
