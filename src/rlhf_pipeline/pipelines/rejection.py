from rlhf_pipeline.config.sample import RejectionConfig
from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.pipelines.ppo import READS as READS
from rlhf_pipeline.pipelines.sample import in_rounds
from rlhf_pipeline.stages.job import StageSpec

SPEC = StageSpec(
    name="rejection",
    program="rlhf_pipeline.training.sft",
    blocks={"rejection": RejectionConfig},
    batch_sizes=("rejection.batch_size",),
    headline_metrics=("rejection/loss", "validation/perplexity"),
)
rejection = in_rounds(SPEC, SFTConfig, "base_model")
