"""Rows of every format: what is read, what is a bad row, and what stops the run."""

import gzip
import io
import json
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_pipeline.data import files as module
from rlhf_pipeline.data.files import FORMATS, read_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

NOT_UTF8 = Unused("not UTF-8")
NUL = Unused("a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8")
BROKEN = Unused("a value that is not valid, such as text that is not UTF-8")
BOM = b"\xef\xbb\xbf"
DAMAGED = "the file is damaged from here on ("


def parquet(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def packed(name, content):
    return gzip.compress(content, mtime=0) if name.endswith(".gz") else content


FILES = {
    "jsonl": '{"text": "é"}\n{"text": "1"}\n'.encode(),
    "json": '[{"text": "é"},\n {"text": "1"}]\n'.encode(),
    "csv": 'text\né\n"1"\n'.encode(),
    "txt": "é\n1\n".encode(),
    "parquet": parquet(pa.table({"text": [f"é {index}" for index in range(9)]})),
}
"""A small file of each format."""
LAST = {"jsonl": (2, "1"), "json": (2, "1"), "csv": (3, "1"), "txt": (1, "é\n1\n"),
        "parquet": (9, "é 8")}  # fmt: skip
"""Line and text of the last row of `FILES`; a text is one row."""
NESTED = [
    {"x": "a", "turns": [{"role": "user", "content": "é"}]},
    {"x": None, "turns": []},
    {"x": "c", "turns": None},
]
ROWS = {
    "csv with quotes": (
        "a.csv",
        'prompt,answer\r\né,"a, ""b""\r\n\nc"\r\n\r\n,\r\nlast,"x\ny"'.encode(),
        [(2, {"prompt": "é", "answer": 'a, "b"\r\n\nc'}), (6, {"prompt": "", "answer": ""}),
         (7, {"prompt": "last", "answer": "x\ny"})],
    ),
    "csv with bare carriage returns": (
        "a.csv", b'x\r1\r"2\r3"\r', [(2, {"x": "1"}), (3, {"x": "2\r3"})],
    ),
    "csv whose column without a name is an index": (
        "a.csv", b",x\n0,1\n", [(2, {"": "0", "x": "1"})],
    ),
    "csv with a long field": (
        "a.csv", b'x\n"' + b"a\n" * 500_000 + b'"\n', [(2, {"x": "a\n" * 500_000})],
    ),
    "text": ("a.txt", "Eins\r\n\r\nZwei é\n".encode(), [(1, {"text": "Eins\r\n\r\nZwei é\n"})]),
    "lines that only a line feed ends": (
        "a.jsonl",
        '{"x": "a\u2028b\u0085c"}\n\n{"x":\r2}\r\n  \n{"x": NaN, "x": "\\ud83d"}'.encode(),
        [(1, {"x": "a\u2028b\u0085c"}), (3, {"x": 2}), (5, {"x": "\ud83d"})],
    ),
    "lines under another name": (
        "a.json", b'\n {"x": 1}\n[2]\n',
        [(2, {"x": 1}), (3, Unused("a JSON list, not an object"))],
    ),
    "an array": (
        "a.json", ' \n[{"x": "a]\\""},\n  {"x":\n [2]}, 12345,\r\n\n{"x": "é"}, null]\n\n'.encode(),
        [(1, {"x": 'a]"'}), (2, {"x": [2]}), (3, Unused("a JSON int, not an object")),
         (4, {"x": "é"}), (5, Unused("a JSON NoneType, not an object"))],
    ),
    "an array with an element that is not UTF-8": (
        "a.json", b'[{"x": "\xe9"}, {"x": 2}]', [(1, NOT_UTF8), (2, {"x": 2})],
    ),
    "parquet": (
        "a.parquet", parquet(pa.Table.from_pylist(NESTED)),
        [(1, NESTED[0]), (2, NESTED[1]), (3, NESTED[2])],
    ),
    "two members of gzip": (
        "a.jsonl.gz", gzip.compress(b'{"x": 1}\n') + gzip.compress(b'{"x": 2}\n'),
        [(1, {"x": 1}), (2, {"x": 2})],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "rows"), ROWS.values(), ids=ROWS)
def test_rows(write, read, name, content, rows):
    """Also below a byte order mark."""
    expected = [(f"{name}:{line}", row) for line, row in rows]
    assert read(write(name, content)) == expected
    if not name.endswith(("gz", "parquet")):
        assert read(write(name, BOM + content)) == expected


@pytest.mark.parametrize(("suffix", "gz"), product(FORMATS, ("", ".gz")))
def test_every_format_plain_and_compressed(write, read, suffix, gz):
    name = f"A.{suffix}{gz}".upper()
    line, text = LAST[suffix]
    rows = read(write(name, packed(f"a{gz}", FILES[suffix])))
    assert rows[-1] == (f"{name}:{line}", {"text": text})


def test_several_files_in_the_order_of_their_names(write, read, tmp_path):
    write("x/b.jsonl", b'{"text": 2}\n')
    write("x/a.json", b'[{"text": 1}]\n')
    assert read(f"{tmp_path}/x/*") == [("a.json:1", {"text": 1}), ("b.jsonl:1", {"text": 2})]
    write("x/d.zip", b"")  # fails before any file is read
    with pytest.raises(DataError, match=r"d.zip: unknown file format; expected"):
        next(read_rows(f"{tmp_path}/x/*", (), "train"))


# --- bad rows -------------------------------------------------------------------------------------

# 0xe9 is é in Latin-1; 0xed 0xa0 0xbd is half a surrogate pair, which UTF-8 excludes.
BAD_LINES = [
    (b'{"x": "\xe9"}', NOT_UTF8),
    (b'{"x": \xed\xa0\xbd}', NOT_UTF8),
    (b'{"x": 1 2}', Unused("not JSON (Expecting ',' delimiter)")),
    (b'{"x": 1} {"x": 2}', Unused("not JSON (Extra data)")),
    (b"null", Unused("a JSON NoneType, not an object")),
    (b'{"x": "a\0b"}', NUL),
    (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Unused("not JSON (nested too deeply)")),
    (b'{"x": ' + b"1" * 10_000 + b"}", Unused("not JSON (a number of too many digits)")),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_broken_line_is_one_bad_row(write, read, name, line, reason):
    rows = read(write(name, b'{"x": 1}\n  ' + line + b'\n{"x": 3}\n'))
    assert rows == [(f"{name}:1", {"x": 1}), (f"{name}:2", reason), (f"{name}:3", {"x": 3})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1", "fewer fields than the header has"),
        (b"1,2,3", "more fields than the header has"),
        (b"\xe9,2", "not UTF-8"),
        (b'"1"1,2', "not CSV (',' expected after '\"')"),
    ],
)
def test_a_broken_csv_row_is_one_bad_row(write, read, line, reason):
    first, bad, last = read(write("a.csv", b'x,y\n"1\n",2\n' + line + b"\n3,4\n"))
    assert bad == ("a.csv:4", Unused(reason))
    assert first == ("a.csv:2", {"x": "1\n", "y": "2"})
    assert last == ("a.csv:5", {"x": "3", "y": "4"})


def test_a_broken_value_is_one_bad_row(write, read, tmp_path):
    """Text that is not UTF-8, or a date out of Python's range, affects no other row."""
    texts = pa.array([b"a", b"\xff", b"c", b"d"]).view(pa.string())
    days = pa.array([0, 0, 2**31 - 1, 0], pa.int32()).view(pa.date32())
    table = pa.table({"x": texts, "day": days})
    rows = read(write("a.parquet", parquet(table)))
    found = [row if isinstance(row, Unused) else row["x"] for _, row in rows]
    assert found == ["a", BROKEN, BROKEN, "d"]
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    saved = [{"x": "a"}, BROKEN, {"x": "c"}, {"x": "d"}]
    assert [row for _, row in read(tmp_path / "saved", ["x"])] == saved


def test_a_saved_value_that_claims_to_be_longer_than_the_file(read, tmp_path):
    """Arrow itself would read beyond the end of the file."""
    data = datasets.Dataset.from_dict({"x": ["first", "second", "third", "last"]})
    data.save_to_disk(str(tmp_path))
    part = tmp_path / "data-00000-of-00001.arrow"
    ends, damaged = struct.pack("<5i", 0, 5, 11, 16, 20), struct.pack("<5i", 0, 5, 1_000, 16, 20)
    assert part.read_bytes().count(ends) == 1
    part.write_bytes(part.read_bytes().replace(ends, damaged))
    assert [row for _, row in read(tmp_path)] == [{"x": "first"}, BROKEN, BROKEN, {"x": "last"}]


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "content", "rows"),
    [
        (4, b"ab\ncdef\ngh\n\n \n\n\n\n\n\nij",
         [(1, "ab\ncdef\n"), (3, "gh\n\n \n"), (11, "ij")]),
        (2, b"ab\nc\xe9\nef\n", [(1, "ab\n"), (2, NOT_UTF8), (3, "ef\n")]),
        (2, "aébécédé".encode(), [(1, "aébéc"), (1, "édé")]),
    ],
)  # fmt: skip
def test_a_long_text_is_cut_at_the_ends_of_lines(write, read, monkeypatch, piece, content, rows):
    monkeypatch.setattr(module, "_PIECE", piece)
    monkeypatch.setattr(module, "MAX_CHARACTERS", 3 if b"\n" not in content else 100)
    assert read(write("a.txt", content)) == [
        (f"a.txt:{line}", {"text": text} if isinstance(text, str) else text) for line, text in rows
    ]


@pytest.mark.parametrize("size", range(1, 12))
def test_elements_that_the_pieces_of_a_file_cut(write, read, monkeypatch, size):
    monkeypatch.setattr(module, "_PIECE", size)
    elements = read(write("a.json", b'[\n{"x": [1, "a,]b"]}, 1234,\n {"\\u00e9": {}} , -1.5e3]\n'))
    assert [element for _, element in elements] == [
        {"x": [1, "a,]b"]},
        Unused("a JSON int, not an object"),
        {"é": {}},
        Unused("a JSON float, not an object"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x": "' + b"a" * 200 + b'"}\n', 2),
        ("b.json", b'\n{"x": "' + b"a" * 200 + b'"}\n', 2),  # the first line
        ("c.json", b'\n{"x": 1}\n{"x": "' + b"a" * 200 + b'"}\n', 3),
        ("a.json", b'[{"x": 1},\n\n{"x": "' + b"a" * 200, 3),
        ("a.csv", b"x,y\n" + b"1," * 60, 2),  # a line without an end
        ("a.csv", b"x,y\n" + b'"1\n",' * 30, 2),  # many short fields
    ],
)
def test_a_row_has_a_limit(write, read, monkeypatch, name, content, line):
    monkeypatch.setattr(module, "_PIECE", 16)
    monkeypatch.setattr(module, "MAX_CHARACTERS", 100)
    with pytest.raises(DataError, match=rf"{name}:{line}: .*has more than 100 characters"):
        read(write(name, content))


# --- faults of a file -----------------------------------------------------------------------------

HEADERS = {
    b"x,y,x": "the header has column 'x' twice. Fix: rename or remove one.",
    b"x\ty": "the header is one column, 'x\\ty': is the delimiter '\\t'? Fix: write the file with",
    b"\xe9,y": "the header line is not UTF-8. Fix: convert the file, for example: iconv",
    b'"x"y,y': "the header line is not CSV (',' expected after '\"'). Fix: correct it.",
    "x,y\n".encode("utf-16"): "the header line has NUL bytes. Fix: convert the file from UTF-16",
}
ARRAYS = [
    (b'[{"x": 1},\n{"x": 2}\n{"x": 3}]', 3, "Expecting ',' delimiter"),
    (b'[{"x": 1},\n{"x": \n 2 3}]', 3, "Expecting ',' delimiter"),
    (b'[{"x": 1},\n', 2, "Expecting value"),
    (b'[{"x": 1},\n{"x": "ab', 2, "Unterminated string starting at"),
    (b'[{"x": 1}]\n[{"x": 2}]', 2, "Extra data"),
    (b'[{"x": 1},\n' + b" " * 3_000_000 + b'\n{"x": 2 3}]', 3, "Expecting ',' delimiter"),
    (b"[" * 100_000 + b"]" * 100_000, 1, "nested too deeply"),
    (b"[" + b"1" * 10_000 + b"]", 1, "a number of too many digits"),
]
FAULTS = [
    *(("a.csv", header + b"\n1,2\n", f"a.csv:1: {fault}") for header, fault in HEADERS.items()),
    *(("a.json", content, f"a.json:{line}: the JSON array is broken ({why}). Fix: correct it")
      for content, line, why in ARRAYS),
    *((f"a.{suffix}", content, f"a.{suffix}: the file contains no rows. Fix: download or create")
      for suffix in ("jsonl", "json", "csv", "txt") for content in (b"\n \r\n\n", BOM)),
    ("a.json", b" []\n", "a.json: the file contains no rows"),
    ("a.parquet", parquet(pa.table({"x": pa.array([], pa.string())})), "contains no rows"),
    ("a.parquet.gz", b"", f"a.parquet.gz:1: {DAMAGED}"),
    ("a.parquet", FILES["parquet"][:-10], f"a.parquet:1: {DAMAGED}Parquet"),
    ("a.csv", b'x,y\n1,2\n1,"2\n' + b"3,4\n" * 1000, "a.csv:3: the row does not end (unexpected"),
    ("a.jsonl.gz", FILES["jsonl"], f"a.jsonl.gz:1: {DAMAGED}Not a gzipped"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), FAULTS)
def test_a_file_that_cannot_be_read_is_named_with_line_and_fix(write, read, name, content, message):
    with pytest.raises(DataError) as error:
        read(write(name, content))
    assert message in str(error.value) and "Fix: " in str(error.value)


def test_a_file_that_may_not_be_read(write, tmp_path):
    """Root may read every file, so the test deletes the file after it was found."""
    write("x/a.jsonl", b'{"x": 1}\n')
    path = Path(write("x/b.jsonl", b'{"x": 2}\n'))
    rows = read_rows(f"{tmp_path}/x/*", (), "train")
    next(rows)
    path.unlink()
    with pytest.raises(DataError, match=r"x/b.jsonl: not found \(.*No such file"):
        next(rows)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_truncated_gz_file(write, read, suffix):
    """The file ends in the header, in the data or in the checksum."""
    name = f"a.{suffix}.gz"
    whole = packed(name, FILES[suffix])
    for end in range(1, len(whole), 1 if len(whole) < 100 else 43):
        with pytest.raises(DataError) as error:
            read(write(name, whole[:end]))
        assert DAMAGED in str(error.value) and name in str(error.value)


def test_the_line_from_which_a_file_is_damaged(write):
    whole = gzip.compress(b'{"x": 1}\n{"x": 2}\n')
    rows = read_rows(write("a.jsonl.gz", whole[:-8] + b"\0" + whole[-7:]), (), "train")
    assert [next(rows)[0], next(rows)[0]] == ["a.jsonl.gz:1", "a.jsonl.gz:2"]
    with pytest.raises(DataError, match=r"a.jsonl.gz:3: the file is damaged .*CRC check failed"):
        next(rows)


# --- columns and saved data sets ------------------------------------------------------------------


def test_only_requested_columns_are_read(write, read, tmp_path):
    whole = {"x": 1, "q": {"a": 2, "b": {"c": 3}}, "y.z": 4, "w": 5}
    path = write("a.parquet", parquet(pa.Table.from_pylist([whole])))
    datasets.Dataset.from_list([whole]).save_to_disk(str(tmp_path / "saved"))
    for columns, row in (
        (["q.b.c"], {"q": {"a": 2, "b": {"c": 3}}}),
        (["y.z", "x"], {"x": 1, "y.z": 4}),
        (["none", "x"], whole),  # so that the message about the missing one can list all columns
    ):
        assert read(path, columns) == [("a.parquet:1", row)]
        assert read(tmp_path / "saved", columns) == [("saved:1", row)]


def test_saved_data_sets(read, tmp_path):
    data = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    data.select([2, 0]).save_to_disk(str(tmp_path / "one"), num_shards=2)
    for path in (tmp_path / "one", f"file://{tmp_path}/one/"):
        assert read(path, (), "whatever") == [("one:1", {"x": 3}), ("one:2", {"x": 1})]
    parts = datasets.DatasetDict({"train": data.select([0]), "test": data.select([1])})
    parts.save_to_disk(str(tmp_path / "many"))
    assert read(tmp_path / "many", (), "test") == [("many/test:1", {"x": 2})]
    with pytest.raises(DataError, match=r"many: split 'valid' not found\. Fix: .*: train, test"):
        read(tmp_path / "many", (), "valid")
    part = tmp_path / "one" / "state.json"
    part.write_bytes(part.read_bytes()[:30])
    with pytest.raises(DataError, match=r"one: cannot be read \(.+\)"):
        read(tmp_path / "one")


# --- any bytes ------------------------------------------------------------------------------------


def ends_well(path, content):
    """Reads rows or gets one DataError; any other exception fails the test."""
    path.write_bytes(content)
    try:
        for place, row in read_rows(str(path), (), "train"):
            assert place.startswith(f"{path.name}:")
            assert isinstance(row, dict | Unused)
    except DataError as error:
        assert str(error).startswith(f"{path}:")


NAMES = st.sampled_from([f"a.{suffix}{gz}" for suffix in FILES for gz in ("", ".gz")])
often = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@often
@given(data=st.data(), name=NAMES)
def test_damage_anywhere(tmp_path, data, name):
    content = bytearray(packed(name, FILES[name.split(".")[1]]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    ends_well(tmp_path / name, content)


@often
@given(
    name=NAMES,
    content=st.one_of(
        st.binary(),
        st.text('[]{}",:\n\r\\ 1eé\0').map(str.encode),
        st.text().map(lambda text: text.encode("utf-16")),
    ),
)
def test_any_bytes(tmp_path, name, content):
    ends_well(tmp_path / name, packed(name, content))


@settings(often, max_examples=40)
@given(
    rows=st.lists(
        st.dictionaries(st.text(max_size=3), st.text(max_size=5)), min_size=1, max_size=4
    ),
    indent=st.none() | st.just(1),
)
def test_lines_and_arrays_are_read_as_they_were_written(tmp_path, rows, indent):
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_rows(f"{tmp_path}/*", (), "train")
    assert [row for _, row in found] == rows * 2


# --- size -----------------------------------------------------------------------------------------

# Without the pages of mapped files; and `ru_maxrss` begins with the memory of the parent.
MEASURE = """
import sys
from pathlib import Path
from rlhf_pipeline.data.files import read_rows
peak = 0
for path in sys.argv[1:]:
    for rows, _ in enumerate(read_rows(path, (), "train"), start=1):
        if rows < 50 or rows % 100 == 0:
            status = Path("/proc/self/status").read_text()
            peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]))
    print(rows, peak // 1024)
"""
TEXT = "wörd " * 200


def write_large(path, thousands):
    """About 1.2 kB per row, uncompressed."""
    if path.suffix == ".parquet":
        table = pa.table({"x": [TEXT] * 1000 * thousands})
        options = {"compression": "none", "use_dictionary": False, "row_group_size": 1000}
        pq.write_table(table, path, **options)
        return
    line = f'{{"x": "{TEXT}"}}\n' if "json" in path.name else f"{TEXT}\n"
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        for _ in range(thousands):
            file.write(line.encode() * 1000)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """For each streamed format: a file of 5 MB and one of 60 MB; peaks in MiB."""
    paths = []
    for thousands, suffix in product((4, 50), ["json", "csv", "parquet", "jsonl.gz", "txt"]):
        paths.append(tmp_path / f"{thousands}.{suffix}")
        write_large(paths[-1], thousands)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], check=True, capture_output=True, text=True
    )
    lines = [map(int, line.split()) for line in run.stdout.splitlines()]
    rows, peaks = zip(*lines, strict=True)
    assert rows == (4_000, 3_999, 4_000, 4_000, 4, 50_000, 49_999, 50_000, 50_000, 48)
    assert peaks[-1] - peaks[4] < 12
