"""The specification of stage evaluate."""

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="evaluate",
    program="rlhf_pipeline.evaluation.evaluate",
    blocks={"evaluate": EvaluateConfig},
)
