"""split + sft_model + reward_model -> ppo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import ppo


def create_pipeline() -> Pipeline:
    """The node of this stage."""
    return Pipeline(
        [
            Node(
                func=ppo,
                inputs=[
                    "split",
                    "sft_model",
                    "reward_model",
                    "params:ppo",
                    "params:seed",
                    "stages",
                ],
                outputs="ppo_model",
                name="ppo",
            )
        ]
    )
