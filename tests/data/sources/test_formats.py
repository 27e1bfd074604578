"""Every source of the hub, read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.records import Example, Record, Text, Unused
from rlhf_pipeline.data.sources.registry import find_source, read

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
