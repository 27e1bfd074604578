"""sources -> base_model"""

from kedro.pipeline import Node, Pipeline

from .nodes import base_model


def create_pipeline() -> Pipeline:
    inputs = ["params:base_model", "params:split", "params:seed", "params:stages"]
    return Pipeline([Node(base_model, inputs, "base_model", name="base_model")])
