"""The file that makes an exported policy an MLflow model, written without importing mlflow."""

from __future__ import annotations

from pathlib import Path

MAX_NEW_TOKENS = 128

# As mlflow.models.Model.save writes it, less what differs from one export to the next (time, random id, versions):
# equal policies have equal bytes. Written without mlflow, which the training programs do not know.
MLMODEL = f"""\
flavors:
  python_function:
    loader_module: rlhf_pipeline.serving
signature:
  inputs: '[{{"type": "string", "name": "prompt", "required": true}}]'
  outputs: '[{{"type": "string", "required": true}}]'
  params: '[{{"name": "max_new_tokens", "default": {MAX_NEW_TOKENS}, "shape": null, "type": "long"}},
    {{"name": "temperature", "default": 0.0, "shape": null, "type": "double"}},
    {{"name": "seed", "default": 0, "shape": null, "type": "long"}}]'
"""


def write_mlmodel(directory: Path) -> None:
    """Make an exported policy an MLflow model, loadable by `mlflow.pyfunc.load_model(directory)`."""
    (directory / "MLmodel").write_text(MLMODEL)
