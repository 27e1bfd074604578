from pathlib import Path

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="sft",
    program="rlhf_pipeline.training.sft",
    blocks={"sft": SFTConfig},
    batch_sizes=("sft.batch_size",),
    headline_metrics=("sft/loss", "validation/perplexity"),
)


def sft(split: Path, base_model: Path, config: SFTConfig, seed: int, stages: Stages) -> Path:
    """Fine-tune the base model on demonstrations."""
    inputs = {"demonstrations": split / "sft", "base_model": base_model}
    return stages.run(Job(SPEC, {"sft": config}, inputs, seed))
