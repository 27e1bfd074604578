from rlhf_pipeline.config.policies import GRPOConfig
from rlhf_pipeline.pipelines.ppo import READS as READS
from rlhf_pipeline.pipelines.ppo import by_rewards, spec_of

SPEC = spec_of(GRPOConfig)
grpo = by_rewards(SPEC)
