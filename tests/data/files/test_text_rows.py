from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_pipeline.data.files import text_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

Read = Callable[..., list[tuple[str, Any]]]
Write = Callable[[str, bytes], str]


def test_csv(write: Write, read: Read) -> None:
    content = 'prompt,answer\r\né,"a, ""b""\r\n\nc"\r\n\r\n,\r\nlast,"x\ny"'.encode()
    rows = [
        ("a.csv:2", {"prompt": "é", "answer": 'a, "b"\r\n\nc'}),
        ("a.csv:6", {"prompt": "", "answer": ""}),
        ("a.csv:7", {"prompt": "last", "answer": "x\ny"}),
    ]
    assert read(write("a.csv", content)) == rows
    assert read(write("a.csv", b"\xef\xbb\xbf" + content)) == rows


def test_csv_with_bare_carriage_returns(write: Write, read: Read) -> None:
    assert read(write("a.csv", b'x\r1\r"2\r3"\r')) == [
        ("a.csv:2", {"x": "1"}),
        ("a.csv:3", {"x": "2\r3"}),
    ]


def test_csv_with_a_long_field(write: Write, read: Read) -> None:
    ((_, row),) = read(write("a.csv", b'x\n"' + b"a\n" * 500_000 + b'"\n'))
    assert len(row["x"]) == 1_000_000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1", "fewer fields than the header has"),
        (b"1,2,3", "more fields than the header has"),
        (b"\xe9,2", "not UTF-8"),
        (b'"1"1,2', "not CSV (',' expected after '\"')"),
    ],
)
def test_a_broken_csv_row_is_one_bad_row(
    write: Write, read: Read, line: bytes, reason: str
) -> None:
    rows = read(write("a.csv", b'x,y\n"1\n",2\n' + line + b"\n3,4\n"))
    assert rows == [
        ("a.csv:2", {"x": "1\n", "y": "2"}),
        ("a.csv:4", Unused(reason)),
        ("a.csv:5", {"x": "3", "y": "4"}),
    ]


def test_a_quote_that_is_never_closed(write: Write, read: Read) -> None:
    with pytest.raises(DataError, match=r"a.csv:3: the row does not end \(unexpected"):
        read(write("a.csv", b'x,y\n1,2\n1,"2\n' + b"3,4\n" * 1000))


def test_the_search_for_the_closing_quote_is_limited(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "MAX_CHARACTERS", 100)
    with pytest.raises(
        DataError,
        match=r"a.csv:3: the row does not end \(the row has more than 100 characters\)\. Fix: "
        r"close its quote",
    ):
        read(write("a.csv", b'x,y\n1,2\n1,"2\n' + b"3,4\n" * 1000))
    assert len(read(write("b.csv", b"x,y\n" + b"3,4\n" * 1000))) == 1000
    for row in (b"1," * 60, b'"1\n",' * 30):  # a line without an end, many short fields
        with pytest.raises(DataError, match=r"c.csv:2: the row does not end \(the row has more"):
            read(write("c.csv", b"x,y\n" + row))


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"x,y,x", "the header has column 'x' twice. Fix: rename or remove one."),
        (b",x,", "2 columns of the header have no name. Fix: name or remove them."),
        (b"x;y", "the header is one column, 'x;y': is the delimiter ';'? Fix: write the file "
         "with commas, or as .jsonl."),
        (b"x\ty", "the header is one column, 'x\\ty': is the delimiter '\\t'? Fix: write the "
         "file with commas, or as .jsonl."),
        (b"\xe9,y", "the header line is not UTF-8. Fix: convert the file, for example: iconv -f "
         "latin1 -t utf-8 FILE > NEW_FILE"),
        (b'"x"y,y', "the header line is not CSV (',' expected after '\"'). Fix: correct it."),
        ("x,y\n".encode("utf-16"), "the header line has NUL bytes. Fix: convert the file from "
         "UTF-16 to UTF-8."),
    ],
)  # fmt: skip
def test_an_invalid_header(write: Write, read: Read, header: bytes, fault: str) -> None:
    with pytest.raises(DataError) as error:
        read(write("a.csv", header + b"\n1,2\n"))
    assert str(error.value).endswith(f"a.csv:1: {fault}")


def test_one_column_without_a_name_is_the_index_of_a_table(write: Write, read: Read) -> None:
    assert read(write("a.csv", b",x\n0,1\n")) == [("a.csv:2", {"": "0", "x": "1"})]


def test_a_text_is_one_document(write: Write, read: Read) -> None:
    content = "\ufeffEins\r\n\r\nZwei é\n".encode()
    assert read(write("a.txt", content)) == [("a.txt:1", {"text": "Eins\r\n\r\nZwei é\n"})]


def test_a_long_text_is_cut_at_the_ends_of_lines(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE", 4)
    assert read(write("a.txt", b"ab\ncdef\ngh\n\n \n\n\n\n\n\nij")) == [
        ("a.txt:1", {"text": "ab\ncdef\n"}),
        ("a.txt:3", {"text": "gh\n\n \n"}),
        ("a.txt:11", {"text": "ij"}),
    ]


def test_a_piece_that_is_not_utf_8(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE", 2)
    rows = [
        ("a.txt:1", {"text": "ab\n"}),
        ("a.txt:2", Unused("not UTF-8")),
        ("a.txt:3", {"text": "ef\n"}),
    ]
    assert read(write("a.txt", b"ab\nc\xe9\nef\n")) == rows


def test_a_text_without_lines_is_cut_too(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE", 2)
    monkeypatch.setattr(text_rows, "MAX_CHARACTERS", 3)
    assert read(write("a.txt", "aébécédé".encode())) == [
        ("a.txt:1", {"text": "aébéc"}),
        ("a.txt:1", {"text": "édé"}),
    ]
