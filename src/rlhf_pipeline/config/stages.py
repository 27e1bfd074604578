from collections.abc import Mapping

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.grpo import POLICIES
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.sample import SAMPLED
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig

SupervisedStage = SFTConfig | RewardModelConfig | DPOConfig | KTOConfig
StageConfig = SupervisedStage | PPOConfig | EvaluateConfig

BLOCKS: Mapping[str, type[StageConfig]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    **POLICIES,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    **SAMPLED,
    "evaluate": EvaluateConfig,
}
"""The parameter blocks of the stages that load models onto ranks."""
