"""The project's pipelines. The order of the stages is the product, from left to right."""

from kedro.pipeline import Pipeline

from rlhf_pipeline.pipelines import data_preparation, dpo, evaluation, ppo, reward_model, sft


def register_pipelines() -> dict[str, Pipeline]:
    """Each stage by itself, and all of them: as `full`, the default, by PPO, as `dpo` by DPO in its place."""
    shared = {
        "data_preparation": data_preparation.create_pipeline(),
        "sft": sft.create_pipeline(),
        "reward_model": reward_model.create_pipeline(),
    }
    by_ppo = {"ppo": ppo.create_pipeline(), "evaluation": evaluation.create_pipeline()}
    full = sum((shared | by_ppo).values(), Pipeline([]))
    by_dpo = sum([*shared.values(), dpo.create_pipeline(), evaluation.create_pipeline("dpo")], Pipeline([]))
    return {**shared, **by_ppo, "full": full, "dpo": by_dpo, "__default__": full}
