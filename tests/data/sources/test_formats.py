"""Every source of the hub, read from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.records import Example, Message, Record, Text, Unused
from rlhf_pipeline.data.source import find_source, read

NAMES = sorted(json.loads(Path(__file__).with_name("rows.json").read_text()))


def jsonl(path: Path, rows: list[dict[str, Any]], split: str) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], split: str) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def saved(path: Path, rows: list[dict[str, Any]], split: str) -> Path:
    import datasets

    both = {split: datasets.Dataset.from_list(rows), "other": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(both).save_to_disk(path)
    return path


def read_from(path: Path, name: str) -> list[tuple[str, Record | Unused]]:
    placed = read(SourceConfig(name=name, path=str(path)), 0)
    return [(place.rpartition(":")[2], record) for place, record in placed]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_records(source_rows, tmp_path: Path, name: str) -> None:
    rows, split = source_rows[name], find_source(name).split
    expected = read_from(jsonl(tmp_path / "rows.jsonl", rows, split), name)
    assert any(isinstance(record, Example | Text) for _, record in expected)
    for write, path in ((parquet, "rows.parquet"), (saved, "rows")):
        assert read_from(write(tmp_path / path, rows, split), name) == expected


@pytest.mark.parametrize("write", [jsonl, parquet, saved])
def test_values_of_every_type_arrive(
    source_rows, tmp_path: Path, write: Callable[..., Path]
) -> None:
    # Numbers, nested strings, strings with citations, and a tie.
    name = "openai/webgpt_comparisons"
    assert read_from(
        write(
            tmp_path / f"rows.{write.__name__}".removesuffix(".saved"), source_rows[name], "train"
        ),
        name,
    ) == [
        (
            "1",
            Example(
                (Message("user", "Why is the sky blue?"),),
                "Air scatters blue light (Rayleigh) more than red.",
                "Because of the sea.",
            ),
        ),
        ("2", Unused("the two answers have the same score", bad=False)),
    ]


def test_flat_sources_are_read_from_csv_too(source_rows, tmp_path: Path) -> None:
    import csv

    for name in ("stanfordnlp/SHP", "nvidia/HelpSteer2", "tatsu-lab/alpaca", "Dahoas/rm-static"):
        rows = source_rows[name]
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        records = [record for _, record in read_from(tmp_path / "rows.csv", name)]
        assert records == [
            record for _, record in read_from(jsonl(tmp_path / "rows.jsonl", rows, "train"), name)
        ]


def test_wikitext_is_read_from_its_text_file_too(source_rows, tmp_path: Path) -> None:
    rows = source_rows["Salesforce/wikitext"]
    (tmp_path / "wiki.train.txt").write_text("".join(row["text"] or " \n" for row in rows))
    records = [
        record for _, record in read_from(tmp_path / "wiki.train.txt", "Salesforce/wikitext")
    ]
    assert records == [
        record
        for _, record in read_from(
            jsonl(tmp_path / "rows.jsonl", rows, "train"), "Salesforce/wikitext"
        )
    ]
    assert len(records) == 2
