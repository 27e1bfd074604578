from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline.data.files import rows as module
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

Read = Callable[..., list[tuple[str, Any]]]
Write = Callable[[str, bytes], str]

BROKEN = Unused("a value that is not valid, such as text that is not UTF-8")


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def test_parquet(write: Write, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_ROWS", 2)
    turns = [[{"role": "user", "content": "é"}], [], None]
    path = write("a.parquet", parquet(pa.table({"x": ["a", None, "c"], "turns": turns})))
    assert read(path) == [
        ("a.parquet:1", {"x": "a", "turns": [{"role": "user", "content": "é"}]}),
        ("a.parquet:2", {"x": None, "turns": []}),
        ("a.parquet:3", {"x": "c", "turns": None}),
    ]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (["x"], {"x": 1}),
        (["q.b.c"], {"q": {"a": 2, "b": {"c": 3}}}),
        (["y.z", "x"], {"x": 1, "y.z": 4}),
        # All columns, so that the message about the missing one can list them.
        (["none", "x"], {"x": 1, "q": {"a": 2, "b": {"c": 3}}, "y.z": 4, "w": 5}),
    ],
)
def test_only_requested_columns_are_read(
    write: Write, read: Read, tmp_path: Path, columns: list[str], row: dict[str, Any]
) -> None:
    rows = [{"x": 1, "q": {"a": 2, "b": {"c": 3}}, "y.z": 4, "w": 5}]
    assert read(write("a.parquet", parquet(pa.Table.from_pylist(rows))), columns) == [
        ("a.parquet:1", row)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", columns) == [("saved:1", row)]


def test_a_broken_value_is_one_bad_row(write: Write, read: Read, tmp_path: Path) -> None:
    """Text that is not UTF-8, or a date out of Python's range, affects no other row."""
    texts = pa.array([b"a", b"\xff", b"c", b"d"]).view(pa.string())
    days = pa.array([0, 0, 2**31 - 1, 0], pa.int32()).view(pa.date32())
    table = pa.table({"x": texts, "day": days})
    rows = read(write("a.parquet", parquet(table)))
    assert [row if isinstance(row, Unused) else row["x"] for _, row in rows] == [
        "a",
        BROKEN,
        BROKEN,
        "d",
    ]
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", ["x"]) == [
        ("saved:1", {"x": "a"}),
        ("saved:2", BROKEN),
        ("saved:3", {"x": "c"}),
        ("saved:4", {"x": "d"}),
    ]


def test_a_damaged_parquet_file(write: Write, read: Read) -> None:
    whole = bytearray(parquet(pa.table({"x": list(range(1000))})))
    with pytest.raises(
        DataError,
        match=r"a.parquet:1: the file is damaged from here on \(.*footer.*\)\. Fix: download or "
        r"create",
    ):
        read(write("a.parquet", bytes(whole[:-10])))


def test_a_column_whose_name_is_not_utf_8(write: Write, read: Read) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"name": [1]}), content, store_schema=False)
    with pytest.raises(DataError, match=r"a.parquet:1: the file is damaged from here on \(.*utf-8"):
        read(write("a.parquet", content.getvalue().replace(b"name", b"n\xffme")))


def test_a_saved_data_set(read: Read, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    data.select([2, 0]).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert read(tmp_path / "saved") == [("saved:1", {"x": 3}), ("saved:2", {"x": 1})]
    assert read(f"file://{tmp_path}/saved/", (), "whatever") == [
        ("saved:1", {"x": 3}),
        ("saved:2", {"x": 1}),
    ]


def test_a_split_of_a_saved_data_set(read: Read, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"x": [1, 2]})
    datasets.DatasetDict({"train": data.select([0]), "test": data.select([1])}).save_to_disk(
        str(tmp_path / "saved")
    )
    assert read(tmp_path / "saved", (), "test") == [("saved/test:1", {"x": 2})]
    with pytest.raises(
        DataError,
        match=r"saved: split 'valid' not found\. Fix: set the source's `split` to one of: train, "
        r"test",
    ):
        read(tmp_path / "saved", (), "valid")


def test_a_saved_value_that_claims_to_be_longer_than_the_file(read: Read, tmp_path: Path) -> None:
    """Arrow itself would read beyond the end of the file."""
    datasets.Dataset.from_dict({"x": ["first", "second", "third", "last"]}).save_to_disk(
        str(tmp_path / "saved")
    )
    part = tmp_path / "saved" / "data-00000-of-00001.arrow"
    ends, damaged = struct.pack("<5i", 0, 5, 11, 16, 20), struct.pack("<5i", 0, 5, 1_000, 16, 20)
    assert part.read_bytes().count(ends) == 1
    part.write_bytes(part.read_bytes().replace(ends, damaged))
    assert [row for _, row in read(tmp_path / "saved")] == [
        {"x": "first"},
        BROKEN,
        BROKEN,
        {"x": "last"},
    ]


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_data_set(read: Read, tmp_path: Path, name: str) -> None:
    datasets.Dataset.from_dict({"x": [1]}).save_to_disk(str(tmp_path / "saved"))
    part = tmp_path / "saved" / name
    part.write_bytes(part.read_bytes()[:30])
    with pytest.raises(DataError, match=r"saved: cannot be read \(.+\)"):
        read(tmp_path / "saved")
