"""split + base_model -> sft_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import sft


def create_pipeline() -> Pipeline:
    inputs = ["split", "base_model", "params:sft", "params:seed", "params:stages"]
    return Pipeline([Node(sft, inputs, "sft_model", name="sft")])
