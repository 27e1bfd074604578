"""The specification of stage sft."""

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="sft",
    program="rlhf_pipeline.training.sft",
    blocks={"sft": SFTConfig},
    batch_sizes=("sft.batch_size",),
    headline_metrics=("sft/loss", "validation/perplexity"),
)
