"""split + sft_model + reward_model -> ppo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import ppo


def create_pipeline() -> Pipeline:
    inputs = ["split", "sft_model", "reward_model", "params:ppo", "params:seed", "params:stages"]
    return Pipeline([Node(ppo, inputs, "ppo_model", name="ppo")])
