"""sft_model + ppo_model -> evaluation; for DPO, sft_model + dpo_model -> dpo_evaluation"""

from kedro.pipeline import Node, Pipeline

from rlhf_pipeline.stages.job import StageSpec

from .nodes import SPEC, evaluate


def create_pipeline(policy: StageSpec) -> Pipeline:
    """The evaluation of the policy that the stage `policy` trains. Names for PPO have no prefix."""
    models = ["sft_model", f"{policy.name}_model", "reward_model"]
    inputs = ["split", *models, "params:evaluate", "params:seed", "params:stages"]
    output = "evaluation" if policy.name == "ppo" else f"{policy.name}_evaluation"
    name = SPEC.for_candidate(policy.name).name
    return Pipeline([Node(evaluate(policy), inputs, output, name=name)])
