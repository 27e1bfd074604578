"""Stage `split` as a launched program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_pipeline.data.records import Example, Message, Text
from rlhf_pipeline.data.split_page import render_markdown
from rlhf_pipeline.data.split_report import headline
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.pipelines.split import SPEC
from rlhf_pipeline.runtime.manifest import Manifest, file_entries, verify
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import StageRunner


@pytest.mark.slow
def test_the_stage_writes_data_report_and_token_contract(
    write_records, split_config, tokenizer, load, tmp_path: Path
) -> None:
    base_model = tmp_path / "base_model"
    tokenizer.save_pretrained(base_model)
    contract = TokenContract.of(tokenizer)
    contract.write(base_model)
    inputs = {"base_model": base_model, "pretraining_0": write_records("texts", Text("~~~~"))}
    # Twelve sources of one prompt each; source_10 comes after source_9, not after source_1.
    inputs |= {
        f"source_{n}": write_records(
            f"own{n}", Example((Message("user", f"Question {n}?"),), "Yes.", "No.")
        )
        for n in range(12)
    }
    for folder in inputs.values():
        Manifest("", "", 0, {}, {}, {}, {}, file_entries(folder)).write(folder)
    export = StageRunner(RunContext(tmp_path / "workspace")).run(
        Job(SPEC, {"split": split_config(count=12, texts=1, only="sft")}, inputs, 0)
    )
    assert [one["id"] for one in load("sft/train.arrow", out=export)] == [
        f"own{n}:0" for n in range(12)
    ]
    folders = {"sft", "reward_model", "ppo", "kto", "evaluation", "pretraining"}
    assert {path.name for path in export.iterdir() if path.is_dir()} == folders
    assert all(TokenContract.read(export / folder) == contract for folder in folders)
    report = json.loads((export / "report.json").read_text())
    assert report["distinct_prompts"]["sft"] == 12
    assert (export / "report.md").read_text() == render_markdown(report)
    assert verify(export).metrics == headline(report)
