"""Write the file that turns an exported policy into an MLflow model, without importing mlflow."""

from pathlib import Path

MAX_NEW_TOKENS = 128

# The content that mlflow.models.Model.save writes, without time, random id and versions, so that
# equal policies have equal bytes. Training programs must not import mlflow.
MLMODEL = f"""\
flavors:
  python_function:
    loader_module: rlhf_pipeline.serving
signature:
  inputs: '[{{"type": "string", "name": "prompt", "required": true}}]'
  outputs: '[{{"type": "string", "required": true}}]'
  params: '[{{"name": "max_new_tokens", "default": {MAX_NEW_TOKENS}, \
"shape": null, "type": "long"}},
    {{"name": "temperature", "default": 0.0, "shape": null, "type": "double"}},
    {{"name": "seed", "default": 0, "shape": null, "type": "long"}}]'
"""


def write_mlmodel(directory: Path) -> None:
    """Write `MLmodel`, so that `mlflow.pyfunc.load_model(directory)` loads the policy."""
    (directory / "MLmodel").write_text(MLMODEL)
