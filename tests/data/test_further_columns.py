"""Further columns of a source reach the prompts of PPO and of the test set, as JSON."""

from __future__ import annotations

import json

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.record_files import RecordsWriter
from rlhf_pipeline.data.records import Unused
from rlhf_pipeline.data.sources.registry import read

COLUMNS = {"prompt": "q", "chosen": "a", "rejected": "b", "extra": ["level", "tags"]}


def write_rows(file):
    rows = [
        {"q": f"What is {n} + {n}?", "a": f"It is {2 * n}.", "b": "No.", "level": n, "tags": ["x"]}
        for n in range(10)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig.model_validate({"name": "files", "path": str(file), "columns": COLUMNS})


def test_the_columns_reach_the_prompts_and_no_other_file(tmp_path, prepare, load):
    with RecordsWriter(tmp_path / "rated", has_extra=True) as writer:
        for place, record in read(write_rows(tmp_path / "rows.jsonl"), seed=1):
            writer.add(place, record)
    (tmp_path / "rated" / "counts.json").write_text("{}")
    prepare(tmp_path / "rated")
    for path in ("ppo/train", "evaluation/test"):
        for row in load(f"{path}.arrow"):
            level = int(row["messages"][0]["content"].split()[2])
            assert json.loads(row["extra"]) == {"level": level, "tags": ["x"]}
    assert "extra" not in load("sft/train.arrow")[0]


def test_a_row_without_the_column_and_a_value_that_json_does_not_know_are_bad(tmp_path):
    config = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "x", "a": "y", "b": "z", "tags": 1}))
    ((_, missing),) = read(config, seed=1)
    assert isinstance(missing, Unused) and "column 'level' is missing" in missing.reason
