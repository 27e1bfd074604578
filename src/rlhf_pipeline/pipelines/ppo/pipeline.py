"""split + sft_model + reward_model -> ppo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import ppo


def create_pipeline() -> Pipeline:
    """The node of this stage."""
    models = ["split", "sft_model", "reward_model"]
    inputs = [*models, "params:ppo", "params:reward_model", "params:seed", "params:stages"]
    return Pipeline([Node(ppo, inputs, "ppo_model", name="ppo")])
