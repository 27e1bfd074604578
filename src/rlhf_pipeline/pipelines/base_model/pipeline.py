"""sources -> base_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import base_model


def create_pipeline() -> Pipeline:
    """The node of this stage."""
    return Pipeline(
        [
            Node(
                func=base_model,
                inputs=["params:base_model", "params:split", "params:seed", "stages"],
                outputs="base_model",
                name="base_model",
            )
        ]
    )
