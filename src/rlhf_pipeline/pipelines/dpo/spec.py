"""The specification of stage dpo."""

from rlhf_pipeline.config.dpo import DPOConfig
from rlhf_pipeline.stages.spec import StageSpec

SPEC = StageSpec(
    name="dpo",
    program="rlhf_pipeline.training.dpo",
    blocks={"dpo": DPOConfig},
    batch_sizes=("dpo.batch_size",),
    headline_metrics=("dpo/loss", "dpo/accuracy", "validation/accuracy"),
    caveats={
        "score": "DPO and the reward model learned from the same comparisons, so this judge "
        "favours DPO.",
        "gold": "DPO never saw the scores of this judge.",
    },
)
