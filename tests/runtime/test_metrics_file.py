"""The metrics file, from the program's side."""

import json

from rlhf_pipeline.runtime import metrics_file as metrics
from rlhf_pipeline.runtime.metrics_file import MetricsFile, RowProgress


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", total_steps=4)
    file.write(3, {"sft/loss": 0.5})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record.pop("time") > 1.7e9
    assert record == {"step": 3, "total_steps": 4, "metrics": {"sft/loss": 0.5}}


def test_rows_are_reported_every_two_seconds(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 2.5, 2.5, 3.0, 4.4, 4.6, 4.6])  # read twice if a line is written
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress = RowProgress(tmp_path / "metrics.jsonl", None)
    for rows in (10, 20, 30, 40, 50):
        progress.at(rows)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    expected = [(rows, {"data/rows_done": float(rows)}) for rows in (20, 50)]
    assert [(record["step"], record["metrics"]) for record in records] == expected
