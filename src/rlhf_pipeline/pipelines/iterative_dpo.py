from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.config.sample import IterativeDPOConfig
from rlhf_pipeline.pipelines.ppo import READS as READS
from rlhf_pipeline.pipelines.sample import in_rounds
from rlhf_pipeline.stages.job import StageSpec

SPEC = StageSpec(
    name="iterative_dpo",
    program="rlhf_pipeline.training.dpo",
    blocks={"iterative_dpo": IterativeDPOConfig},
    batch_sizes=("iterative_dpo.batch_size",),
    headline_metrics=("iterative_dpo/loss", "iterative_dpo/accuracy", "validation/accuracy"),
)
iterative_dpo = in_rounds(SPEC, DPOConfig, "sft_model")
