"""sft_model + ppo_model + evaluation -> registration, and the same for another candidate"""

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.stages.job import StageSpec

from .nodes import register


def create_pipeline(policy: StageSpec) -> Pipeline:
    """The registration of the policy that a stage trains. The names for PPO have no prefix."""
    prefix, suffix = ("", "") if policy.name == "ppo" else (f"{policy.name}_", f"_{policy.name}")
    models = ["sft_model", f"{policy.name}_model"]
    inputs = [*models, f"{prefix}evaluation", "params:register", "params:split", "params:project"]
    return Pipeline([Node(register, inputs, f"{prefix}registration", name=f"register{suffix}")])
