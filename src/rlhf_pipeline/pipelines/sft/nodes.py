"""The node that trains the SFT model."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config.training import SFTConfig
from rlhf_pipeline.stages.job import Job, Stages

from .spec import SPEC


def sft(split: Path, base_model: Path, config: SFTConfig, seed: int, stages: Stages) -> Path:
    """Fine-tune the base model on demonstrations."""
    inputs = {"demonstrations": split / "sft", "base_model": base_model}
    return stages.run(Job(SPEC, {"sft": config}, inputs, seed))
