"""Workspaces and artifacts of earlier versions of this package."""

import json
from pathlib import Path

import pytest
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.pipeline_registry import register_pipelines
from rlhf_pipeline.runtime.manifest import FileEntry, Manifest, verify
from rlhf_pipeline.stages.cache.planning import EARLIER_FORM

PROJECT = Path(__file__).parents[1]

MANIFEST = """{
  "adjusted": {"sft.micro_batch_size_per_gpu": {"configured": 8, "used": 4}},
  "config": {"sft": {"epochs": 1.0}},
  "deepspeed": {"policy": {"train_batch_size": 8}},
  "digest": "414b59934b29da654e117a2a9c94f49c9ee7c3390108576b7a2af81db544df6e",
  "files": {
    "weights": {
      "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
      "size": 3
    }
  },
  "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
  "inputs": {"examples": "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee"},
  "metrics": {"validation/loss": 0.5},
  "ranks": 2,
  "seed": 7,
  "stage": "sft",
  "versions": {"torch": "2.13.0"}
}"""
"""Manifest of a folder with the file `weights`, written before recipes had a form."""

RECIPE = {
    "stage": "source",
    "seed": 1234,
    "config": {
        "source": {
            "name": "synthetic",
            "revision": None,
            "subset": None,
            "split": None,
            "columns": None,
            "samples": 600,
        }
    },
    "inputs": {},
    "code": {"data/ingest.py": "23fd53dfa6237f194b21334ca56045673ce7ce35d0fff17f5665c8a9d88ca0ef"},
    "versions": {"datasets": "5.2.0", "pyarrow": "25.0.1"},
    "processes": 1,
}
"""Recipe of the same time."""


def test_a_manifest_without_a_form_is_read_and_verified(tmp_path):
    (tmp_path / "weights").write_text("abc")
    (tmp_path / "manifest.json").write_text(MANIFEST)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert verify(tmp_path) == Manifest(
        stage="sft",
        fingerprint="f" * 64,
        seed=7,
        config={"sft": {"epochs": 1.0}},
        inputs={"examples": "e" * 64},
        versions={"torch": "2.13.0"},
        metrics={"validation/loss": 0.5},
        files={"weights": FileEntry(size=3, sha256=digest)},
        ranks=2,
        deepspeed={"policy": {"train_batch_size": 8}},
    )


@pytest.mark.parametrize("form", [{}, {"form": 1}], ids=["none", "earlier"])
def test_status_reports_a_recipe_of_an_earlier_form(tmp_path, form):
    directory = tmp_path / "07_workspace" / "source" / "0123456789abcdef"
    directory.mkdir(parents=True)
    (directory / "recipe.json").write_text(json.dumps(RECIPE | form))
    bootstrap_project(PROJECT)
    with KedroSession.create(
        PROJECT, env="tiny", runtime_params={"root": str(tmp_path)}
    ) as session:
        catalog = session.load_context().catalog
        rows = planned_rows(register_pipelines()["full"], catalog)
    assert (rows[0].stage, rows[0].state, rows[0].details) == (
        "source synthetic",
        "run",
        EARLIER_FORM,
    )
    assert {row.state for row in rows} == {"run"}
