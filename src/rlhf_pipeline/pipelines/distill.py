from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.data.token_contract import NAME, common_contract
from rlhf_pipeline.pipelines import base_model
from rlhf_pipeline.pipelines.ppo import shared_inputs, spec_of
from rlhf_pipeline.stages.job import Job, Stages

TEACHER = replace(base_model.SPEC, name="teacher", blocks={})
"""Fetches the teacher like a base model."""

SPEC = replace(spec_of(DistillConfig), headline_metrics=("objective/kl", "validation/kl"))
READS = "split sft_model"


def distill(
    split: Path, sft_model: Path, config: DistillConfig | None, seed: int, stages: Stages
) -> Path:
    """Train the SFT model towards the teacher, on its own answers to the prompts of phase `ppo`.

    Raises ArtifactError before the stage starts if both have different tokenizers.
    """
    assert config is not None, "checked before the run"
    identity = base_model.base_model_identity(config.teacher, "distill.teacher")
    teacher = stages.run(Job(TEACHER, {"base_model": config.teacher}, {}, 0, identity))
    models = {"sft_model": sft_model, "distill.teacher": teacher}
    if all((folder / NAME).is_file() for folder in models.values()):  # a plan has none yet
        common_contract(models, "choose a teacher with the student's tokenizer and chat template")
    inputs = shared_inputs(split, sft_model, config) | {"teacher": teacher}
    spec = SPEC.answering_by(config.generator)
    return stages.run(Job(spec, {spec.name: config}, inputs, seed))
