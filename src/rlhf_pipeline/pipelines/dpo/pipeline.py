"""split + sft_model -> dpo_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import dpo


def create_pipeline() -> Pipeline:
    inputs = ["split", "sft_model", "params:dpo", "params:seed", "params:stages"]
    return Pipeline([Node(dpo, inputs, "dpo_model", name="dpo")])
