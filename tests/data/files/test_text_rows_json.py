from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_pipeline.data.files import text_rows
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError

Read = Callable[..., list[tuple[str, Any]]]
Write = Callable[[str, bytes], str]

NUL = "a NUL byte in the line; a file in UTF-16 is to be converted to UTF-8"


def test_lines(write: Write, read: Read) -> None:
    content = b'{"x": 1}\n\n{"x": "\xc3\xa9"}\r\n  \n{"x": NaN, "x": 3}'
    rows = [("a.jsonl:1", {"x": 1}), ("a.jsonl:3", {"x": "é"}), ("a.jsonl:5", {"x": 3})]
    assert read(write("a.jsonl", content)) == rows
    assert read(write("a.jsonl", b"\xef\xbb\xbf" + content)) == rows


def test_only_a_line_feed_ends_a_line(write: Write, read: Read) -> None:
    content = '{"x": "a\u2028b\u0085c"}\n{"x":\r2}\n'.encode()
    assert read(write("a.jsonl", content)) == [
        ("a.jsonl:1", {"x": "a\u2028b\u0085c"}),
        ("a.jsonl:2", {"x": 2}),
    ]


# 0xe9 is é in Latin-1; 0xed 0xa0 0xbd is half a surrogate pair, which UTF-8 excludes.
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"x": "\xe9"}', "not UTF-8"),
        (b'{"x": "\xed\xa0\xbd"}', "not UTF-8"),
        (b'{"x": \xe9}', "not UTF-8"),
        (b'{"x": 1 2}', "not JSON (Expecting ',' delimiter)"),
        (b'{"x": 1', "not JSON (Expecting ',' delimiter)"),
        (b'{"x": 1} {"x": 2}', "not JSON (Extra data)"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b"null", "a JSON NoneType, not an object"),
        (b'{"x": "a\0b"}', NUL),
        (b"\0" * 10, NUL),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON (nested too deeply)"),
        (b'{"x": ' + b"1" * 10_000 + b"}", "not JSON (a number of too many digits)"),
    ],
)
@pytest.mark.parametrize("indent", [b"", b"   "])
def test_a_broken_line_is_one_bad_row(
    write: Write, read: Read, line: bytes, reason: str, indent: bytes
) -> None:
    """The reason does not depend on the position of the fault in the line."""
    rows = read(write("a.jsonl", b'{"x": 1}\n' + indent + line + b'\n{"x": 3}\n'))
    assert rows == [("a.jsonl:1", {"x": 1}), ("a.jsonl:2", Unused(reason)), ("a.jsonl:3", {"x": 3})]


def test_half_a_surrogate_pair_is_left_to_the_record_checks(write: Write, read: Read) -> None:
    assert read(write("a.jsonl", rb'{"x": "\ud83d"}')) == [("a.jsonl:1", {"x": "\ud83d"})]


def test_a_long_line(write: Write, read: Read) -> None:
    ((_, row),) = read(write("a.jsonl", b'{"x": "' + b"a" * 10_000_000 + b'"}\n'))
    assert len(row["x"]) == 10_000_000


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le"])
def test_utf_16(write: Write, read: Read, codec: str) -> None:
    rows = read(write("a.jsonl", '{"x": 1}\n{"x": 2}\n'.encode(codec)))
    assert {row for _, row in rows} == {Unused(NUL)}


def test_json_lines_under_another_name(write: Write, read: Read) -> None:
    rows = [("a.json:2", {"x": 1}), ("a.json:3", Unused("a JSON list, not an object"))]
    assert read(write("a.json", b'\n {"x": 1}\n[2]\n')) == rows


def test_an_array(write: Write, read: Read) -> None:
    content = (
        '\ufeff \n[{"x": "a]\\""},\n  {"x":\n [2]}, 12345,\r\n\n{"x": "é"}, '
        '"\\ud83d", -1.5e3 ,null]\n\n'
    ).encode()
    assert read(write("a.json", content)) == [
        ("a.json:1", {"x": 'a]"'}),
        ("a.json:2", {"x": [2]}),
        ("a.json:3", Unused("a JSON int, not an object")),
        ("a.json:4", {"x": "é"}),
        ("a.json:5", Unused("a JSON str, not an object")),
        ("a.json:6", Unused("a JSON float, not an object")),
        ("a.json:7", Unused("a JSON NoneType, not an object")),
    ]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'[{"x": 1},\n{"x": 2}\n{"x": 3}]', 3, "Expecting ',' delimiter"),
        (b'[{"x": 1},\n{"x": \n 2 3}]', 3, "Expecting ',' delimiter"),
        (b'[{"x": 1},\n', 2, "Expecting value"),
        (b'[{"x": 1},\n{"x": "ab', 2, "Unterminated string starting at"),
        (b'[{"x": 1}]\n[{"x": 2}]', 2, "Extra data"),
        (b'[{"x": 1},\n' + b" " * 3_000_000 + b'\n{"x": 2 3}]', 3, "Expecting ',' delimiter"),
        (b"[" * 100_000 + b"]" * 100_000, 1, "nested too deeply"),
        (b"[" + b"1" * 10_000 + b"]", 1, "a number of too many digits"),
    ],
)
def test_a_broken_array(write: Write, read: Read, content: bytes, line: int, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.json", content))
    assert (
        f"a.json:{line}: the JSON array is broken ({reason}). Fix: correct it, or write one "
        "object per line" in str(caught.value)
    )


def test_an_element_that_is_not_utf_8_is_one_bad_row(write: Write, read: Read) -> None:
    assert read(write("a.json", b'[{"x": "\xe9"}, {"x": 2}]')) == [
        ("a.json:1", Unused("not UTF-8")),
        ("a.json:2", {"x": 2}),
    ]


@pytest.mark.parametrize("size", range(1, 12))
def test_elements_that_the_pieces_of_a_file_cut(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE", size)
    elements = read(write("a.json", b'[{"x": [1, "a,]b"]}, 1234,\n {"\\u00e9": {}} , -1.5e3]\n'))
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
        ("a.json", b'[{"x": 1},\n\n{"x": "' + b"a" * 200, 3),
    ],
)
def test_a_row_has_a_limit(
    write: Write, read: Read, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, line: int
) -> None:
    monkeypatch.setattr(text_rows, "_PIECE", 16)
    monkeypatch.setattr(text_rows, "MAX_CHARACTERS", 100)
    with pytest.raises(DataError, match=rf"{name}:{line}: .*the row has more than 100 characters"):
        read(write(name, content))
