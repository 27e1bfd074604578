"""prepared_data + sft_model -> dpo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import dpo


def create_pipeline() -> Pipeline:
    """Nodes from left to right."""
    return Pipeline(
        [
            Node(
                func=dpo,
                inputs=["prepared_data", "sft_model", "params:dpo", "params:launch", "params:seed", "workspace"],
                outputs="dpo_model",
                name="dpo",
            ),
        ]
    )
