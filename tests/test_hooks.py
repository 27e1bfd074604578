"""What a run says of itself is about its own results."""

from pathlib import Path

import pytest
from kedro.io import DataCatalog, Version
from kedro.io.core import DatasetError
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset

from rlhf_pipeline.datasets.checkpoint import CheckpointDataset
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.hooks import ErrorHook, ProgressHook
from rlhf_pipeline.stages.manifest import Manifest, file_entries


def export(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(content)
    Manifest("ppo", content, 1, {}, {}, {}, {}, file_entries(folder)).write(folder)
    return folder


def registration(number: str) -> dict:
    return {"model": "policy", "aliases": {"candidate": number}, "refusals": [], "compare": "/"}


def test_a_run_shows_what_it_made_though_another_one_finished_meanwhile(tmp_path, capsys):
    def catalog(save: str) -> DataCatalog:
        version = Version(None, save)
        return DataCatalog(
            {
                "ppo_model": CheckpointDataset(filepath=str(tmp_path / "ppo_model"), version=version),
                "registration": JSONDataset(filepath=str(tmp_path / "registration.json"), version=version),
            }
        )

    mine, theirs = catalog("2026-01-01T00.00.00.000Z"), catalog("2026-01-02T00.00.00.000Z")
    theirs.save("ppo_model", export(tmp_path / "theirs", "theirs"))
    theirs.save("registration", registration("8"))
    made = {"ppo_model": export(tmp_path / "mine", "mine"), "registration": registration("7")}
    nodes = [Node(registration, inputs="number", outputs=name, name=name) for name in made]
    hook = ProgressHook()
    hook.before_pipeline_run()
    for name, result in made.items():
        mine.save(name, result)
        hook.after_node_run(outputs={name: result})
    hook.after_pipeline_run(pipeline=Pipeline(nodes), catalog=mine)
    shown = capsys.readouterr().out
    assert "candidate = version 7" in shown
    assert "2026-01-01T00.00.00.000Z/ppo_model" in shown
    assert "version 8" not in shown and "2026-01-02" not in shown


def test_a_failure_that_the_catalog_has_wrapped_is_shown_as_itself():
    told = StageError("the disk is full")
    wrapped = DatasetError("sft_model: ...")
    wrapped.__cause__ = DatasetError("...")
    wrapped.__cause__.__cause__ = told
    with pytest.raises(StageError) as caught:
        ErrorHook().on_pipeline_error(error=wrapped)
    assert caught.value is told
    ErrorHook().on_pipeline_error(error=DatasetError("Kedro's own"))
