"""The specification of stage reward_model."""

from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="reward_model",
    program="rlhf_pipeline.training.reward_model",
    blocks={"reward_model": RewardModelConfig},
    batch_sizes=("reward_model.batch_size",),
    headline_metrics=("reward_model/loss", "reward_model/accuracy", "validation/accuracy"),
)
