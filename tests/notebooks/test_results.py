"""The example notebook, executed on the artifacts of a real run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "results.ipynb"


@pytest.mark.long
def test_the_notebook_runs_and_draws(project, monkeypatch):
    monkeypatch.setenv("RLHF_DATA", str(project.root))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=1800,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "gold" in str(outputs[1]["data"])
    assert [output for output in outputs if output.get("name") == "stderr"] == []


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
