from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from rlhf_pipeline.config.training import OptimizerConfig, SupervisedConfig


class SimPOConfig(SupervisedConfig):
    """Simple preference optimization."""

    batch_size: PositiveInt = 32
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5)
    beta: PositiveFloat = 2.0
    margin: NonNegativeFloat = 1.0
