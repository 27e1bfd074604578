"""Stages that train on rows: SFT, the reward model, DPO and KTO on those of the split, rejection
sampling and iterative DPO on the best of a policy's own answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import JUDGE_PREFIX
from rlhf_pipeline.config.preferences import DPOConfig, KTOConfig
from rlhf_pipeline.config.rewards import uses_trained
from rlhf_pipeline.config.sample import (
    IterativeDPOConfig,
    RejectionConfig,
    SampledConfig,
    TableConfig,
)
from rlhf_pipeline.config.split import OWN_COMPARISONS, SAME_COMPARISONS, SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig, SFTConfig, SupervisedConfig
from rlhf_pipeline.pipelines.ppo import reward_inputs
from rlhf_pipeline.pipelines.preparation import reward_base
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
SAMPLE = StageSpec(
    name="sample",
    program="rlhf_pipeline.evaluation.sample",
    headline_metrics=("sample/score", "sample/chosen_score", "sample/without_row"),
)
REJECTION = supervised(
    "rejection", RejectionConfig, "sft", "rejection/loss", "validation/perplexity"
)
ITERATIVE_DPO = supervised(
    "iterative_dpo", IterativeDPOConfig, "dpo",
    "iterative_dpo/loss", "iterative_dpo/accuracy", "validation/accuracy",
)  # fmt: skip


def sft(split: Path, base_model: Path, config: SFTConfig | None, seed: int, stages: Stages) -> Path:
    """Fine-tune the base model on demonstrations; null passes it on as it is."""
    if config is None:
        return base_model
    inputs = {"demonstrations": split / "sft", "base_model": base_model}
    return stages.run(Job(SFT, {"sft": config}, inputs, seed))


def reward_model(
    base_model: Path,
    split: Path,
    sft_model: Path,
    data: SplitConfig,
    config: RewardModelConfig | None,
    seed: int,
    stages: Stages,
) -> Path:
    """Train a model with a scalar head on comparisons; null passes the SFT model on as it is."""
    if config is None:
        return sft_model
    inputs = {"comparisons": split / "reward_model"}
    if config.base_model is not None and (own := split / OWN_COMPARISONS).is_dir():
        inputs = {"comparisons": own, SAME_COMPARISONS: split / "reward_model"}
    own_base = reward_base(config, data, seed, stages) or base_model
    inputs |= {"sft_model": sft_model} if config.start == "sft" else {"base_model": own_base}
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


def _in_rounds(policy: StageSpec, block: type[SupervisedConfig], start: str) -> Callable[..., Path]:
    """The node function of a policy that answers and trains on its answers, in each round.

    Its program reads the parameters `block`, and starts from its input `start`.
    """

    def node(
        split: Path,
        sft_model: Path,
        reward_model: Path,
        trained: RewardModelConfig | None,
        config: Any,
        seed: int,
        stages: Stages,
    ) -> Path:
        """Train the SFT model on the best of its own answers to the prompts of the phase `ppo`."""
        assert isinstance(config, SampledConfig), "checked before the run"
        model, own = sft_model, config.model_dump(include={*block.model_fields})
        rewards, known = reward_inputs(config.rewards)
        judges, identities = reward_inputs(config.rewards, JUDGE_PREFIX)
        if uses_trained(config.rewards):
            judges["reward_model"] = reward_model
        spec = SAMPLE.answering_by(config.sample.generator)
        for number in range(1, config.rounds + 1):
            table = TableConfig(kind=config.kind, round=number, rewards=config.rewards)
            blocks = {config.sampler: config.sample, "table": table}
            inputs = {"prompts": split / "ppo", "policy": model} | judges
            inputs |= config.sample.code_inputs()
            samples = stages.run(Job(spec, blocks, inputs, seed, identities))
            blocks = {policy.name: block.model_validate(own), "table": table}
            inputs = {start: model, config.kind: samples} | rewards
            if isinstance(config, IterativeDPOConfig) and config.fixed_reference and number > 1:
                inputs["reference"] = sft_model  # in the first round, the policy starts as it
            model = stages.run(Job(policy, blocks, inputs, seed, known))
        return model

    return node


rejection = _in_rounds(REJECTION, SFTConfig, "base_model")
iterative_dpo = _in_rounds(ITERATIVE_DPO, DPOConfig, "sft_model")
