"""The node that registers a candidate policy and the SFT baseline."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.register import RegisterConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.tracking.model_registry import register_evaluated


def register(
    sft_model: Path,
    candidate_model: Path,
    evaluation: Path,
    config: RegisterConfig,
    split: SplitConfig,
    project: Path,
) -> dict[str, Any]:
    """Register both policies in MLflow; promote the candidate if it passes the gate."""
    data = ", ".join(source.label() for source in split.sources)
    return asdict(register_evaluated(sft_model, candidate_model, evaluation, config, data, project))
