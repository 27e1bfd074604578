"""Stage base_model: prepares the base model."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.pipelines.split.nodes import read_sources
from rlhf_pipeline.stages.external_inputs import base_model_identity
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

logger = logging.getLogger(__name__)

SPEC = StageSpec(
    name="base_model",
    program="rlhf_pipeline.models.base_model",
    blocks={"base_model": BaseModelConfig},
    distributed=False,
)


def base_model(config: BaseModelConfig, split: SplitConfig, seed: int, stages: Stages) -> Path:
    """Fetch the base model, or build a small one with a tokenizer trained on the sources."""
    if config.is_gguf:
        logger.warning(
            "base_model.path: %s: quantized weights become float32, but the precision they lost is "
            "not restored; the stage's base_model/bits_per_weight is what they had",
            config.path,
        )
    records = {} if config.path else read_sources("source", split.records(), split, seed, stages)
    job = Job(SPEC, {"base_model": config}, records, seed, base_model_identity(config))
    return stages.run(job)
