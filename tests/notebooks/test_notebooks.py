"""The notebooks, executed on the artifacts of a finished run."""

import ast
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("results", "tutorial")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_a_copy_of_a_run_and_trains_nothing_again(
    name, project, tmp_path, monkeypatch
):
    root = tmp_path / "data"
    shutil.copytree(project.root, root, symlinks=True)
    monkeypatch.setenv("RLHF_DATA", str(root))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    notebook, resources = read(name), {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    if name == "results":
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert "gold" in str(outputs[1]["data"])
        assert [output for output in outputs if output.get("name") == "stderr"] == []
    else:
        printed = str(outputs)
        for shown in ("gold", "objective/kl", "the brief judge", "Assistant:"):
            assert shown in printed, printed
    for stage in ("sft", "ppo"):
        assert len([*(root / "07_workspace" / stage).iterdir()]) == len(project.recipes(stage))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_without_outputs_and_its_imports_exist(name):
    for cell in read(name).cells:
        assert not cell.get("outputs")
        for node in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})
