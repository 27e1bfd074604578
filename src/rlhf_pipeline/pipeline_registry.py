from kedro.pipeline import Pipeline

from rlhf_pipeline.pipelines import base_model, evaluate, register, report, reward_model, sft, split
from rlhf_pipeline.stage_registry import policy_stages


def register_pipelines() -> dict[str, Pipeline]:
    """`full`, the default, trains by PPO; `dpo` by DPO instead. The others are parts of `full`."""
    parts = {
        "data_preparation": base_model.create_pipeline() + split.create_pipeline(),
        "sft": sft.create_pipeline(),
        "reward_model": reward_model.create_pipeline(),
    }
    shared = sum(parts.values(), Pipeline([]))
    by_policy = {}
    for name, package in policy_stages().items():
        training = package.create_pipeline()
        last = (evaluate, register, report)
        evaluation = sum((each.create_pipeline(package.SPEC) for each in last), Pipeline([]))
        by_policy[name] = shared + training + evaluation
        if name == "ppo":
            parts |= {"ppo": training, "evaluation": evaluation}
    full = by_policy.pop("ppo")
    return {**parts, "full": full, **by_policy, "__default__": full}
