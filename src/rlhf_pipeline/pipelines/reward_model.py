from pathlib import Path

from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="reward_model",
    program="rlhf_pipeline.training.reward_model",
    blocks={"reward_model": RewardModelConfig},
    batch_sizes=("reward_model.batch_size",),
    headline_metrics=("reward_model/loss", "reward_model/accuracy", "validation/accuracy"),
)


def reward_model(
    split: Path, sft_model: Path, config: RewardModelConfig | None, seed: int, stages: Stages
) -> Path:
    """Train the SFT model with a scalar head on comparisons; null passes it on as it is."""
    if config is None:
        return sft_model
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(SPEC, {"reward_model": config}, inputs, seed))
