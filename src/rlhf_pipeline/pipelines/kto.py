from pathlib import Path

from rlhf_pipeline.config.preferences import KTOConfig
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="kto",
    program="rlhf_pipeline.training.kto",
    blocks={"kto": KTOConfig},
    batch_sizes=("kto.batch_size",),
    headline_metrics=("kto/loss", "kto/kl", "validation/loss"),
)
READS = "split sft_model"


def kto(split: Path, sft_model: Path, config: KTOConfig, seed: int, stages: Stages) -> Path:
    """Train the SFT model by KTO on answers that are known to be good or bad."""
    comparisons, labelled = split / "reward_model", split / "kto"
    inputs = {"comparisons": comparisons, "labelled": labelled, "sft_model": sft_model}
    return stages.run(Job(SPEC, {"kto": config}, inputs, seed))
