from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.evaluate import CHAMPION as NAME_OF_CHAMPION
from rlhf_pipeline.config.evaluate import (
    JUDGE_PREFIX,
    SFT_ROWS,
    CandidateConfig,
    EvaluateConfig,
    task_inputs,
)
from rlhf_pipeline.config.rewards import Judge, ModelJudge, as_judges, local_source
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.hub import commit_of
from rlhf_pipeline.pipelines.ppo import reward_inputs
from rlhf_pipeline.stages.job import Job, Stages, StageSpec

SPEC = StageSpec(
    name="evaluate",
    program="rlhf_pipeline.evaluation.evaluate",
    blocks={"evaluate": EvaluateConfig},
)

CHAMPION = StageSpec(name=NAME_OF_CHAMPION, program=SPEC.program)
"""The present champion, which answers the prompts of a candidate."""

MODELS = StageSpec(name="evaluate_models", program=SPEC.program)
"""Models that `kedro rlhf evaluate` compares."""


def evaluate(policy: StageSpec) -> Callable[..., Path]:
    """The node function for a policy trained by the stage `policy`, such as PPO or DPO."""
    candidate = CandidateConfig(name=policy.name)

    def node(
        split: Path,
        sft_model: Path,
        candidate_model: Path,
        reward_model: Path,
        trained: RewardModelConfig | None,
        policy_config: Any,
        config: EvaluateConfig,
        seed: int,
        stages: Stages,
    ) -> Path:
        """Let both policies answer the same held-out prompts, and compare the answers."""
        inputs = {
            "prompts": split / "evaluation",
            SFT_ROWS: split / "sft",
            "sft_model": sft_model,
            f"{policy.name}_model": candidate_model,
        }
        if trained is None:
            config = judged_by_rewards(config, policy_config)
        else:
            inputs["reward_model"] = reward_model
        return _run(SPEC.for_candidate(policy.name), inputs, candidate, config, seed, stages)

    return node


def evaluate_models(
    models: Mapping[str, Path],
    prompts: Mapping[str, Path],
    config: EvaluateConfig,
    seed: int,
    stages: Stages,
) -> Path:
    """Let models answer the same prompts, each in its own tokens; the first is the baseline.

    Both mappings are by the name of the model; the prompts are folders `evaluation` of splits.
    """
    names = tuple(models)
    inputs = {f"{name}_model": folder for name, folder in models.items()}
    inputs |= {f"{name}_prompts": folder for name, folder in prompts.items()}
    return _run(MODELS, inputs, CandidateConfig(name=names[1], models=names), config, seed, stages)


def _run(
    spec: StageSpec,
    inputs: Mapping[str, Path],
    candidate: CandidateConfig,
    config: EvaluateConfig,
    seed: int,
    stages: Stages,
) -> Path:
    judges, identities = judge_inputs(config.judges)
    if config.tasks is not None:
        spec = replace(spec, libraries=(*spec.libraries, "lm_eval"))
    spec = spec.answering_by(config.generator)
    blocks, files = {"evaluate": config, "candidate": candidate}, task_inputs(config.tasks)
    return stages.run(Job(spec, blocks, {**inputs, **judges, **files}, seed, identities))


def judged_by_rewards(config: EvaluateConfig, policy: Any) -> EvaluateConfig:
    """The evaluation without a reward model: unless it has judges, they are the rewards that the
    policy's training has maximized."""
    rewards = getattr(policy, "rewards", ())
    return config.model_copy(update={"judges": config.judges or as_judges(rewards)})


def judge_inputs(judges: Sequence[Judge]) -> tuple[dict[str, Path], dict[str, str]]:
    """Inputs of the judges, like `reward_inputs`; for a reward model on the hub, its commit.

    Raises ArtifactError if the hub cannot be reached, or has no such model.
    """
    paths, identities = reward_inputs([local_source(judge) for judge in judges], JUDGE_PREFIX)
    for index, judge in enumerate(judges):
        if isinstance(judge, ModelJudge) and judge.folder is None:
            place = f"{JUDGE_PREFIX}{index}"
            try:
                identities[place] = commit_of("model", judge.model, judge.revision)
            except LookupError as error:
                raise ArtifactError(f"evaluate.{place}: {error}") from error
    return paths, identities
