from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_pipeline.data.record_files import RowCounts
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.errors import DataError


def counted(*, rows: int, bad: int) -> RowCounts:
    counts = RowCounts(rows=rows)
    for line in range(1, bad + 1):
        counts.add_unused(f"own.jsonl:{line}", Unused("the chosen answer is empty"))
    return counts


def test_counts_by_reason_are_written_and_read(tmp_path: Path) -> None:
    counts = RowCounts(rows=10)
    for line, row in enumerate(
        [
            Unused("the chosen answer is empty"),
            Unused("a tie", bad=False),
            Unused("the answers are equal: „ja“"),
            Unused("the chosen answer is empty"),
            Unused("a tie", bad=False),
            Unused("a tie", bad=False),
        ],
        start=1,
    ):
        counts.add_unused(f"own.jsonl:{line}", row)
    counts.write(tmp_path)
    read = RowCounts.read(tmp_path)
    assert read == counts
    assert read.rows == 10
    assert read.bad == {"the chosen answer is empty": 2, "the answers are equal: „ja“": 1}
    assert read.skipped == {"a tie": 3}
    assert read.first_bad == [
        ("own.jsonl:1", "the chosen answer is empty"),
        ("own.jsonl:3", "the answers are equal: „ja“"),
        ("own.jsonl:4", "the chosen answer is empty"),
    ]


def test_counting_continues_after_reading(tmp_path: Path) -> None:
    counted(rows=10, bad=1).write(tmp_path)
    counts = RowCounts.read(tmp_path)
    counts.add_unused("own.jsonl:7", Unused("a tie", bad=False))
    counts.add_unused("own.jsonl:8", Unused("the chosen answer is empty"))
    assert (counts.bad.total(), counts.skipped.total(), len(counts.first_bad)) == (2, 1, 2)


def test_too_many_bad_rows_are_an_error_with_the_first_three(tmp_path: Path) -> None:
    counts = counted(rows=16, bad=6)
    counts.check_bad_fraction(0.375, "files (own.jsonl)")  # 6 / 16
    with pytest.raises(DataError) as error:
        counts.check_bad_fraction(0.374, "files (own.jsonl)")
    assert str(error.value) == (
        "source files (own.jsonl): 6 of 16 rows are bad, more than split.max_bad_fraction=0.374 "
        "allows. The first bad rows:"
        + "".join(f"\n  own.jsonl:{line}: the chosen answer is empty" for line in range(1, 4))
        + "\nFix: correct these rows, or set split.max_bad_fraction to at least 0.375 to leave "
        "bad rows out."
    )


@pytest.mark.parametrize(
    ("rows", "bad", "advised"),
    [
        (3, 1, "0.334"),  # a third, rounded upwards
        (100_000, 1, "0.001"),
        (100, 29, "0.29"),  # 0.29 * 100 is 28.999999999999996 as a float
        (1000, 29, "0.029"),
    ],
)
def test_the_advised_fraction_is_enough(rows: int, bad: int, advised: str) -> None:
    counts = counted(rows=rows, bad=bad)
    with pytest.raises(DataError, match=rf"max_bad_fraction to at least {advised} to leave"):
        counts.check_bad_fraction(0.0, "synthetic")
    counts.check_bad_fraction(float(advised), "synthetic")


def test_zero_bad_rows_are_always_allowed() -> None:
    counted(rows=5, bad=0).check_bad_fraction(0.0, "synthetic")
    RowCounts().check_bad_fraction(0.0, "synthetic")


def test_skipped_rows_are_not_bad() -> None:
    counts = RowCounts(rows=2)
    counts.add_unused("own.jsonl:1", Unused("a tie", bad=False))
    counts.check_bad_fraction(0.0, "files (own.jsonl)")
    assert counts.first_bad == []


def test_if_most_rows_are_bad_the_column_map_is_suspected_and_no_fraction_is_advised() -> None:
    with pytest.raises(DataError, match="Fix: correct the source's `columns` or the file") as error:
        counted(rows=10, bad=6).check_bad_fraction(0.1, "files (own.jsonl)")
    assert "max_bad_fraction to" not in str(error.value)
    assert len(str(error.value).splitlines()) == 5


@pytest.mark.parametrize("bad", [1, 9])
def test_rows_in_another_encoding_are_to_be_converted(bad: int) -> None:
    counts = RowCounts(rows=10)
    for line in range(bad):
        counts.add_unused(f"own.csv:{line}", Unused("not UTF-8"))
    with pytest.raises(DataError, match=r"own\.csv:0: not UTF-8\n(.|\n)*Fix: convert the file, for "
                       r"example: iconv -f latin1 -t utf-8 FILE > NEW_FILE$"):  # fmt: skip
        counts.check_bad_fraction(0.0, "files (own.csv)")
