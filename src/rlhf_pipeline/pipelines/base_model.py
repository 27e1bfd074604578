from pathlib import Path

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.pipelines.split import read_sources
from rlhf_pipeline.stages.external_inputs import base_model_identity
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="base_model",
    program="rlhf_pipeline.models.base_model",
    blocks={"base_model": BaseModelConfig},
    distributed=False,
)


def base_model(config: BaseModelConfig, split: SplitConfig, seed: int, stages: Stages) -> Path:
    """Fetch the base model, or build a small one with a tokenizer trained on the sources."""
    records = {} if config.path else read_sources("source", split.records(), split, seed, stages)
    job = Job(SPEC, {"base_model": config}, records, seed, base_model_identity(config))
    return stages.run(job)
