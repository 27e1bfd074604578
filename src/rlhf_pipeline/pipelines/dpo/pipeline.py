"""split + sft_model -> dpo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import dpo


def create_pipeline() -> Pipeline:
    """The node of this stage."""
    return Pipeline(
        [
            Node(
                func=dpo,
                inputs=["split", "sft_model", "params:dpo", "params:seed", "stages"],
                outputs="dpo_model",
                name="dpo",
            )
        ]
    )
