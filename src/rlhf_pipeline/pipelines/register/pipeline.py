"""evaluation, with what it was made from -> registration; the same for another candidate"""

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.stages.job import StageSpec

from .nodes import register


def create_pipeline(policy: StageSpec) -> Pipeline:
    """The registration of the policy that a stage trains. The names for PPO have no prefix."""
    prefix, suffix = ("", "") if policy.name == "ppo" else (f"{policy.name}_", f"_{policy.name}")
    artifacts = ["split", "sft_model", f"{policy.name}_model", "reward_model"]
    parameters = ["register", "split", "evaluate", "seed", "stages"]
    inputs = [*artifacts, f"{prefix}evaluation", *(f"params:{name}" for name in parameters)]
    inputs += ["workspace", "params:project"]
    return Pipeline([Node(register, inputs, f"{prefix}registration", name=f"register{suffix}")])
