"""split + base_model -> sft_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import sft


def create_pipeline() -> Pipeline:
    """The node of this stage."""
    return Pipeline(
        [
            Node(
                func=sft,
                inputs=["split", "base_model", "params:sft", "params:seed", "stages"],
                outputs="sft_model",
                name="sft",
            )
        ]
    )
