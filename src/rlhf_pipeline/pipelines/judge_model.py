"""The second reward model, which judges: a stage within the node that evaluates a policy."""

from dataclasses import replace
from pathlib import Path

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import JUDGE_MODEL, FoldConfig, JudgeModelConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.preparation import SPLIT, split
from rlhf_pipeline.pipelines.supervised import REWARD_MODEL
from rlhf_pipeline.stages.job import Job, Stages

SPEC = replace(REWARD_MODEL, name=JUDGE_MODEL, blocks={}, batch_sizes=())
SPLIT_OF_FILE = replace(SPLIT, name="judge_split", blocks={})
SPECS = SPLIT_OF_FILE, SPEC
FOLDS, EPOCHS = 5, 10.0
"""Some hundred comparisons of a file are too few to hold some out: five models train on four fifths
each and judge together, and their accuracy counts every comparison once. One pass would be few
steps."""


def judge_models(
    rows: Path,
    sft_model: Path,
    config: JudgeModelConfig,
    trained: RewardModelConfig,
    data: SplitConfig,
    seed: int,
    stages: Stages,
) -> dict[str, Path]:
    """Train the SFT model with a scalar head on comparisons held back, or on those of a file.

    Returns the models by the name of the input.
    """
    comparisons, epochs = rows / JUDGE_MODEL, config.epochs or trained.epochs
    folds: list[dict[str, Block]] = [{}]
    if config.path is not None:
        own = {
            "sources": (config.source,),
            "weights": (0.0, 1.0, 0.0),
            "held_back": 0.0,
            "validation_fraction": 0.0,
            "test_fraction": 0.0,
            "pretraining": None,
        }
        careful = split(sft_model, data.model_copy(update=own), seed, stages, SPLIT_OF_FILE)
        comparisons, epochs = careful / "reward_model", config.epochs or EPOCHS
        folds = [{"fold": FoldConfig(number=number, of=FOLDS)} for number in range(FOLDS)]
    block: dict[str, Block] = {"reward_model": trained.model_copy(update={"epochs": epochs})}
    inputs = {"comparisons": comparisons, "sft_model": sft_model}
    return {
        f"{JUDGE_MODEL}.{number}": stages.run(Job(SPEC, block | fold, inputs, seed))
        for number, fold in enumerate(folds)
    }
