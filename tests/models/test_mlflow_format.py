"""The MLmodel file that turns an exported policy into an MLflow model."""

from rlhf_pipeline.models.mlflow_format import write_mlmodel


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
