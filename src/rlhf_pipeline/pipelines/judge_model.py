"""The second reward model, which judges: a stage within the node that evaluates a policy."""

from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.evaluate import JUDGE_MODEL, JudgeModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.preparation import split
from rlhf_pipeline.pipelines.supervised import REWARD_MODEL
from rlhf_pipeline.stages.job import Job, Stages

SPEC = replace(REWARD_MODEL, name=JUDGE_MODEL, blocks={}, batch_sizes=())
EPOCHS_OF_A_FILE = 10.0
"""Some hundred comparisons give few steps in one pass."""
VALIDATION_OF_A_FILE = 0.2
"""Share of a file's conversations that measures the accuracy: with 300 comparisons, some 60."""


def judge_model(
    rows: Path,
    sft_model: Path,
    config: JudgeModelConfig,
    trained: RewardModelConfig,
    data: SplitConfig,
    seed: int,
    stages: Stages,
) -> Path:
    """Train the SFT model with a scalar head on comparisons held back, or on those of a file."""
    comparisons, epochs = rows / JUDGE_MODEL, trained.epochs
    if config.path is not None:
        own = {
            "sources": (config.source,),
            "weights": (0.0, 1.0, 0.0),
            "held_back": 0.0,
            "validation_fraction": VALIDATION_OF_A_FILE,
            "test_fraction": 0.0,
            "pretraining": None,
        }
        careful = split(sft_model, data.model_copy(update=own), seed, stages)
        comparisons, epochs = careful / "reward_model", EPOCHS_OF_A_FILE
    block = trained.model_copy(update={"epochs": config.epochs or epochs})
    inputs = {"comparisons": comparisons, "sft_model": sft_model}
    return stages.run(Job(SPEC, {"reward_model": block}, inputs, seed))
