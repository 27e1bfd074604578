from __future__ import annotations

import gzip
import io
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_pipeline.data.files import Format
from rlhf_pipeline.data.formats import read_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

Read = Callable[..., list[tuple[str, Any]]]
Write = Callable[[str, bytes], str]

_parquet = io.BytesIO()
pq.write_table(pa.table({"text": [f"é {index}" for index in range(9)]}), _parquet)

FILES: dict[str, bytes] = {
    "jsonl": '{"text": "é"}\n{"text": "1"}\n'.encode(),
    "json": '[{"text": "é"},\n {"text": "1"}]\n'.encode(),
    "csv": 'text\né\n"1"\n'.encode(),
    "txt": "é\n1\n".encode(),
    "parquet": _parquet.getvalue(),
}
"""A small file of each format."""


def packed(name: str, content: bytes) -> bytes:
    return gzip.compress(content, mtime=0) if name.endswith(".gz") else content


def test_a_file_of_each_format() -> None:
    assert set(FILES) == set(get_args(Format))


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize(
    ("suffix", "second"),
    [
        ("jsonl", ("2", {"text": "1"})),
        ("json", ("2", {"text": "1"})),
        ("csv", ("3", {"text": "1"})),
        ("parquet", ("2", {"text": "é 1"})),
    ],
)
def test_every_format_plain_and_compressed(
    write: Write, read: Read, suffix: str, gz: str, second: tuple[str, dict[str, str]]
) -> None:
    name = f"A.{suffix}{gz}".upper()
    line, row = second
    assert read(write(name, packed(f"a{gz}", FILES[suffix])))[1] == (f"{name}:{line}", row)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_plain_and_compressed(write: Write, read: Read, name: str) -> None:
    assert read(write(name, packed(name, FILES["txt"]))) == [(f"{name}:1", {"text": "é\n1\n"})]


def test_several_files_in_the_order_of_their_names(
    write: Write, read: Read, tmp_path: Path
) -> None:
    write("x/b.jsonl", b'{"text": 2}\n')
    write("x/a.json", b'[{"text": 1}]\n')
    write("x/c.csv", b"text\n3\n")
    assert read(f"{tmp_path}/x/*") == [
        ("a.json:1", {"text": 1}),
        ("b.jsonl:1", {"text": 2}),
        ("c.csv:2", {"text": "3"}),
    ]


def test_an_unknown_format_fails_before_any_file_is_read(write: Write, tmp_path: Path) -> None:
    write("x/a.jsonl", b"{}\n")
    write("x/b.zip", b"")
    with pytest.raises(DataError, match=r"b.zip: unknown file format; expected"):
        next(read_rows(f"{tmp_path}/x/*", (), "train"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *product(("a.jsonl", "a.json", "a.csv", "a.txt"), (b"", b"\n \r\n\n", b"\xef\xbb\xbf")),
        ("a.json", b" []\n"),
        ("a.csv", b"text\n\n"),
        ("a.parquet.gz", b""),
        ("a.parquet", b""),
    ],
)
def test_an_empty_file(write: Write, read: Read, name: str, content: bytes) -> None:
    message = (
        r":1: the file is damaged from here on"
        if "parquet" in name
        else ": the file contains no rows. Fix: download or create the file again"
    )
    with pytest.raises(DataError, match=f"{name}{message}"):
        read(write(name, content))


def test_an_empty_table(write: Write, read: Read) -> None:
    empty = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array([], pa.string())}), empty)
    with pytest.raises(DataError, match=r"a.parquet: the file contains no rows"):
        read(write("a.parquet", empty.getvalue()))


def test_a_file_that_may_not_be_read(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read every file, so the test deletes the file after it was found."""
    write("x/a.jsonl", b'{"x": 1}\n')
    path = Path(write("x/b.jsonl", b'{"x": 2}\n'))
    rows = read_rows(f"{tmp_path}/x/*", (), "train")
    next(rows)
    path.unlink()
    with pytest.raises(DataError, match=r"x/b.jsonl: not found \(.*No such file"):
        next(rows)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz", "csv.gz", "txt.gz", "parquet.gz"])
def test_a_truncated_gz_file(write: Write, read: Read, suffix: str) -> None:
    """The file ends in the header, in the data or in the checksum."""
    name = f"a.{suffix}"
    whole = packed(name, FILES[suffix.removesuffix(".gz")])
    for end in range(1, len(whole), 1 if len(whole) < 100 else 13):
        with pytest.raises(
            DataError,
            match=rf"{name}:\d: the file is damaged from here on \(.+\)\. Fix: download or create",
        ):
            read(write(name, whole[:end]))


def test_the_line_from_which_a_file_is_damaged(write: Write) -> None:
    whole = gzip.compress(b'{"x": 1}\n{"x": 2}\n')
    rows = read_rows(write("a.jsonl.gz", whole[:-8] + b"\0" + whole[-7:]), (), "train")
    assert [next(rows)[0], next(rows)[0]] == ["a.jsonl.gz:1", "a.jsonl.gz:2"]
    with pytest.raises(
        DataError, match=r"a.jsonl.gz:3: the file is damaged from here on \(CRC check failed"
    ):
        next(rows)


def test_a_gz_file_that_is_not_compressed(write: Write, read: Read) -> None:
    with pytest.raises(
        DataError, match=r"a.jsonl.gz:1: the file is damaged from here on \(Not a gzipped file"
    ):
        read(write("a.jsonl.gz", FILES["jsonl"]))


def test_two_gzip_members_in_one_file(write: Write, read: Read) -> None:
    rows = read(write("a.jsonl.gz", gzip.compress(b'{"x": 1}\n') + gzip.compress(b'{"x": 2}\n')))
    assert rows == [("a.jsonl.gz:1", {"x": 1}), ("a.jsonl.gz:2", {"x": 2})]


def ends_well(path: Path) -> None:
    """Reads rows or gets one DataError; any other exception fails the test."""
    try:
        for place, row in read_rows(str(path), (), "train"):
            assert place.startswith(f"{path.name}:")
            assert isinstance(row, dict | Unused)
    except DataError as error:
        assert str(error).startswith(f"{path}:")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_anywhere(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([f"a.{suffix}{gz}" for suffix in FILES for gz in ("", ".gz")]))
    content = bytearray(packed(name, FILES[name.split(".")[1]]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / name
    path.write_bytes(content)
    ends_well(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from([f"a.{suffix}{gz}" for suffix in FILES for gz in ("", ".gz")]),
    content=st.one_of(
        st.binary(),
        st.text('[]{}",:\n\r\\ 1eé\0').map(str.encode),
        st.text().map(lambda text: text.encode("utf-16")),
    ),
    pack=st.booleans(),
)
def test_any_bytes(tmp_path: Path, name: str, content: bytes, pack: bool) -> None:
    path = tmp_path / name
    path.write_bytes(packed(name, content) if pack else content)
    ends_well(path)


# --- size -----------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from rlhf_pipeline.data.formats import read_rows
for path in sys.argv[1:]:
    rows = sum(1 for _ in read_rows(path, (), "train"))
    print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
TEXT = "wörd " * 200


def write_large(path: Path, rows: int) -> None:
    """About 1.2 kB per row, uncompressed."""
    kind = path.name.split(".")[1]
    if kind == "parquet":
        table = pa.table({"x": [TEXT] * 1000})
        with pq.ParquetWriter(
            path, table.schema, compression="none", use_dictionary=False
        ) as writer:
            for _ in range(rows // 1000):
                writer.write_table(table)
        return
    line = f'{{"x": "{TEXT}"}}\n' if kind == "jsonl" else f"{TEXT}\n"
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        for _ in range(rows // 1000):
            file.write(line.encode() * 1000)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """For each streamed format: a file of 5 MB and one of 60 MB; peaks in MiB."""
    suffixes = ["jsonl", "csv", "parquet", "jsonl.gz", "txt"]
    paths = [tmp_path / f"{rows}.{suffix}" for rows in (4_000, 50_000) for suffix in suffixes]
    for path in paths:
        write_large(path, int(path.name.split(".")[0]))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], check=True, capture_output=True, text=True
    )
    rows, peaks = zip(
        *((int(number) for number in line.split()) for line in run.stdout.splitlines()), strict=True
    )
    assert rows == (4_000, 3_999, 4_000, 4_000, 4, 50_000, 49_999, 50_000, 50_000, 48)
    assert peaks[-1] - peaks[4] < 12
