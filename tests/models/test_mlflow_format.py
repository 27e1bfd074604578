"""The MLmodel file that turns an exported policy into an MLflow model."""

import subprocess
import sys
from pathlib import Path

from rlhf_pipeline.models.mlflow_format import write_mlmodel

SOURCE = Path(__file__).parents[2] / "src"


def test_mlflow_reads_the_signature_and_the_loader(tmp_path):
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, ParamSchema, ParamSpec, Schema

    write_mlmodel(tmp_path)
    read = Model.load(tmp_path)
    assert read.signature == ModelSignature(
        Schema([ColSpec("string", "prompt")]),
        Schema([ColSpec("string")]),
        ParamSchema(
            [
                ParamSpec("max_new_tokens", "long", 128),
                ParamSpec("temperature", "double", 0.0),
                ParamSpec("seed", "long", 0),
            ]
        ),
    )
    assert read.flavors == {"python_function": {"loader_module": "rlhf_pipeline.serving"}}


def test_writing_imports_neither_mlflow_nor_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from rlhf_pipeline.models.mlflow_format import write_mlmodel\n"
        "write_mlmodel(Path(sys.argv[1]))\n"
        "print({'mlflow', 'torch', 'transformers', 'pandas'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
