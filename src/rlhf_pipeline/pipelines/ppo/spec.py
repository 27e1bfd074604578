"""The specification of stage ppo."""

from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="ppo",
    program="rlhf_pipeline.training.ppo",
    blocks={"ppo": PPOConfig},
    batch_sizes=("ppo.rollout_batch_size", "ppo.minibatch_size", "ppo.ptx.batch_size"),
    headline_metrics=("objective/score", "objective/kl", "validation/score"),
    caveats={
        "score": "PPO was trained to maximize the score of the reward model, so this judge "
        "favours PPO.",
        "gold": "PPO never saw the scores of this judge.",
    },
)
