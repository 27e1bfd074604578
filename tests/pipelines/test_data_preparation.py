"""The nodes that prepare the data: sources are read once for all stages, and bad rows stop them before anything is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.pipelines.data_preparation import nodes
from rlhf_pipeline.runtime.manifest import Manifest, file_entries
from rlhf_pipeline.stages import events

ROWS = [
    {"prompt": f"Question {n}?", "chosen": f"Right {n}.", "rejected": f"Wrong {n}."}
    for n in range(9)
]
BAD = {"prompt": "Question?", "chosen": "", "rejected": "Wrong."}


class Launches:
    """Hears the stages, with "found" for those that had finished before."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def stage_started(self, run: events.StageRun) -> None:
        self.heard.append(f"{run.stage} found" if run.cached else run.stage)

    def stage_metrics(self, run: events.StageRun, records: object) -> None: ...

    def stage_ended(self, run: events.StageRun, status: str, metrics: object) -> None: ...


@pytest.fixture
def base_model(tokenizer, tmp_path: Path) -> Path:
    """As much of a base model as the split reads."""
    folder = tmp_path / "base_model"
    tokenizer.save_pretrained(folder)
    TokenContract.of(tokenizer).write(folder)
    Manifest("base_model", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


@pytest.fixture
def split(base_model: Path, tmp_path: Path) -> Callable[..., tuple[Path, list[str]]]:
    """Runs the node on two files and a text; returns the data and the stages that were heard."""
    for name, rows in {"one.jsonl": [*ROWS, BAD], "two.jsonl": ROWS[:2]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "documents.txt").write_text("A few words, more than a block of them.\n")

    def split(**changes: Any) -> tuple[Path, list[str]]:
        config = SplitConfig(
            sources=[
                {"name": "files", "path": str(tmp_path / name)}
                for name in ("one.jsonl", "two.jsonl")
            ],
            pretraining={
                "sources": [
                    {
                        "name": "files",
                        "path": str(tmp_path / "documents.txt"),
                        "columns": {"text": "text"},
                    },
                ],
                "block_tokens": 4,
            },
            max_prompt_tokens=200,
            max_response_tokens=200,
            validation_fraction=0.1,
            test_fraction=0.1,
            **changes,
        )
        launches = Launches()
        with events.listening(launches):
            made = nodes.split(
                base_model, config, LaunchConfig(processes=1), 0, tmp_path / "workspace"
            )
        return made, launches.heard

    return split


@pytest.mark.slow
def test_sources_are_read_once_and_bad_rows_are_looked_at_every_time(split) -> None:
    with pytest.raises(
        DataError,
        match=r"source files \(one\.jsonl\): 1 of 10 rows .*\n  one\.jsonl:10: the chosen",
    ):
        split()
    made, heard = split(max_bad_fraction=0.1)
    assert heard == ["source found", "source found", "source", "split"]
    report = json.loads((made / "report.json").read_text())
    assert [
        (source["rows"], source["duplicates_merged"]) for source in report["sources"].values()
    ] == [(10, 0), (2, 2)]
    assert report["pretraining"]["documents"] == 1
    # How many bad rows are allowed decides no byte: nothing is launched, but the check is made.
    assert split(max_bad_fraction=0.5) == (
        made,
        ["source found", "source found", "source found", "split found"],
    )
    with pytest.raises(DataError, match="1 of 10 rows"):
        split(max_bad_fraction=0.09)
    # Another division reads no source again.
    other, heard = split(max_bad_fraction=0.1, weights=(1, 1, 1))
    assert other != made
    assert heard == ["source found", "source found", "source found", "split"]
