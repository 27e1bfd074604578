"""The specification of stage base_model."""

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="base_model",
    program="rlhf_pipeline.models.base_model",
    blocks={"base_model": BaseModelConfig},
    distributed=False,
)
