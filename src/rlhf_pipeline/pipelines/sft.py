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


def sft(split: Path, base_model: Path, config: SFTConfig | None, seed: int, stages: Stages) -> Path:
    """Fine-tune the base model on demonstrations; null passes it on as it is."""
    if config is None:
        return base_model
    inputs = {"demonstrations": split / "sft", "base_model": base_model}
    return stages.run(Job(SPEC, {"sft": config}, inputs, seed))
