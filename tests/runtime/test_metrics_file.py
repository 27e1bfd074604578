"""The metrics file, from the program's side."""

import json

from rlhf_pipeline.runtime import metrics_file as metrics
from rlhf_pipeline.runtime.metrics_file import MetricsFile, RowProgress


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", total_steps=4)
    file.write(3, {"sft/loss": 0.5})
    [record] = records(tmp_path / "metrics.jsonl")
    assert record.pop("time") > 1.7e9
    assert record == {"step": 3, "total_steps": 4, "metrics": {"sft/loss": 0.5}}


def test_rows_are_reported_every_two_seconds(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 2.5, 2.5, 3.0, 4.4, 4.6, 4.6])  # read twice if a line is written
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress = RowProgress(tmp_path / "metrics.jsonl", None)
    for rows in (10, 20, 30, 40, 50):
        progress.at(rows)
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == [20, 50]
    assert records(tmp_path / "metrics.jsonl")[0]["metrics"] == {"data/rows_done": 20.0}
