"""base_model + sources -> split"""

from kedro.pipeline import Node, Pipeline

from .nodes import split


def create_pipeline() -> Pipeline:
    inputs = ["base_model", "params:split", "params:seed", "params:stages"]
    return Pipeline([Node(split, inputs, "split", name="split")])
