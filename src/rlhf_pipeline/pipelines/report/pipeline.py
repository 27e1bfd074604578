"""evaluation + registration + models -> evaluation_page; the same for another candidate"""

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.stages.job import StageSpec

from .nodes import report


def create_pipeline(policy: StageSpec) -> Pipeline:
    """The page of the policy that a stage trains. The names for PPO have no prefix."""
    prefix, suffix = ("", "") if policy.name == "ppo" else (f"{policy.name}_", f"_{policy.name}")
    inputs = [f"{prefix}evaluation", f"{prefix}registration"]
    inputs += [f"{policy.name}_model", "reward_model", "sft_model"]
    return Pipeline([Node(report, inputs, f"{prefix}evaluation_page", name=f"report{suffix}")])
