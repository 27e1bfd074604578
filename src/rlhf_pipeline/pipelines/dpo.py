from pathlib import Path

from rlhf_pipeline.config.preferences import DPOConfig
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="dpo",
    program="rlhf_pipeline.training.dpo",
    blocks={"dpo": DPOConfig},
    batch_sizes=("dpo.batch_size",),
    headline_metrics=("dpo/loss", "dpo/accuracy", "validation/accuracy"),
)
READS = "split sft_model"


def dpo(split: Path, sft_model: Path, config: DPOConfig, seed: int, stages: Stages) -> Path:
    """Train the SFT model by DPO on the comparisons of the reward model."""
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(SPEC, {"dpo": config}, inputs, seed))
