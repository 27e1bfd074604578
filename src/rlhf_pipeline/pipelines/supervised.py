"""Stages that train on rows of the split: SFT, the reward model, DPO and KTO."""

from pathlib import Path

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig
from rlhf_pipeline.stages.job import Job, Stages, StageSpec


def supervised(name: str, block: type[Block], program: str, *metrics: str) -> StageSpec:
    """A stage that runs a program of `training` on rows, and shows some metrics."""
    return StageSpec(
        name=name,
        program=f"rlhf_pipeline.training.{program}",
        blocks={name: block},
        batch_sizes=(f"{name}.batch_size",),
        headline_metrics=metrics,
    )


SFT = supervised("sft", SFTConfig, "sft", "sft/loss", "validation/perplexity")
REWARD_MODEL = supervised(
    "reward_model", RewardModelConfig, "reward_model",
    "reward_model/loss", "reward_model/accuracy", "validation/accuracy",
)  # fmt: skip
DPO = supervised("dpo", DPOConfig, "dpo", "dpo/loss", "dpo/accuracy", "validation/accuracy")
KTO = supervised("kto", KTOConfig, "kto", "kto/loss", "kto/kl", "validation/loss")


def sft(split: Path, base_model: Path, config: SFTConfig | None, seed: int, stages: Stages) -> Path:
    """Fine-tune the base model on demonstrations; null passes it on as it is."""
    if config is None:
        return base_model
    inputs = {"demonstrations": split / "sft", "base_model": base_model}
    return stages.run(Job(SFT, {"sft": config}, inputs, seed))


def reward_model(
    split: Path, sft_model: Path, config: RewardModelConfig | None, seed: int, stages: Stages
) -> Path:
    """Train the SFT model with a scalar head on comparisons; null passes it on as it is."""
    if config is None:
        return sft_model
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(REWARD_MODEL, {"reward_model": config}, inputs, seed))


def dpo(split: Path, sft_model: Path, config: DPOConfig, seed: int, stages: Stages) -> Path:
    """Train the SFT model by DPO on the comparisons of the reward model."""
    inputs = {"comparisons": split / "reward_model", "sft_model": sft_model}
    return stages.run(Job(DPO, {"dpo": config}, inputs, seed))


def kto(split: Path, sft_model: Path, config: KTOConfig, seed: int, stages: Stages) -> Path:
    """Train the SFT model by KTO on answers that are known to be good or bad."""
    comparisons, labelled = split / "reward_model", split / "kto"
    inputs = {"comparisons": comparisons, "labelled": labelled, "sft_model": sft_model}
    return stages.run(Job(KTO, {"kto": config}, inputs, seed))
