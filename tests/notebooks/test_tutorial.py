"""The tutorial notebook, executed on a copy of a finished run, whose stages it reuses."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(project, tmp_path, monkeypatch):
    root = tmp_path / "data"
    shutil.copytree(project.root, root, symlinks=True)
    monkeypatch.setenv("RLHF_DATA", str(root))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    ).execute()
    cells = [str(cell.get("outputs")) for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(cells)
    for shown in ("gold", "objective/kl", "the brief judge", "Assistant:"):
        assert shown in printed, printed
    for stage in ("sft", "ppo"):
        copied = project.root / "07_workspace" / stage
        assert len(list((root / "07_workspace" / stage).iterdir())) == len(list(copied.iterdir()))


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
