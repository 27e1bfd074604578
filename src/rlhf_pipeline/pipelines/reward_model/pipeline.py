"""split + sft_model -> reward_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import reward_model


def create_pipeline() -> Pipeline:
    inputs = ["split", "sft_model", "params:reward_model", "params:seed", "params:stages"]
    return Pipeline([Node(reward_model, inputs, "reward_model", name="reward_model")])
