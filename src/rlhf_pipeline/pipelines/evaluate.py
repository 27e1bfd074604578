"""Nodes after the training of a policy: evaluation, registration and page.

The second reward model, which judges, is a stage within the node of the evaluation.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.evaluate import CHAMPION as NAME_OF_CHAMPION
from rlhf_pipeline.config.evaluate import (
    JUDGE_MODEL,
    JUDGE_PREFIX,
    SFT_ROWS,
    TASK_PREFIX,
    CandidateConfig,
    EvaluateConfig,
    FoldConfig,
    JudgeModelConfig,
    RegisterConfig,
    task_inputs,
)
from rlhf_pipeline.config.rewards import as_judges
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.pipelines.ppo import reward_inputs
from rlhf_pipeline.pipelines.preparation import SPLIT, reward_base, split
from rlhf_pipeline.pipelines.supervised import REWARD_MODEL
from rlhf_pipeline.runtime.manifest import verify
from rlhf_pipeline.stages.cache.workspace import DOWNLOADS
from rlhf_pipeline.stages.job import TRAINING_LIBRARIES, Job, Stages, StageSpec
from rlhf_pipeline.tracking.registration import register_evaluated
from rlhf_pipeline.tracking.store import find_champion
from rlhf_pipeline.verdict.page import evaluation_page

SPEC = StageSpec(
    name="evaluate",
    program="rlhf_pipeline.evaluation.evaluate",
    blocks={"evaluate": EvaluateConfig},
)

TASKS = StageSpec(
    name="tasks",
    program="rlhf_pipeline.evaluation.tasks",
    distributed=False,
    libraries=(*TRAINING_LIBRARIES, "lm_eval"),
)
"""What a policy achieves in tasks, before an evaluation that reads it."""

CHAMPION = StageSpec(name=NAME_OF_CHAMPION, program=SPEC.program)
"""The present champion, which answers the prompts of a candidate."""

UNTOUCHED = StageSpec(name="untouched", program=SPEC.program)
"""The base model, which answers the prompts of a study beside its baseline."""

MODELS = StageSpec(name="evaluate_models", program=SPEC.program)
"""Models that `kedro rlhf evaluate` compares."""

JUDGE = replace(REWARD_MODEL, name=JUDGE_MODEL, blocks={}, batch_sizes=())
JUDGE_SPLIT = replace(SPLIT, name="judge_split", blocks={})
FOLDS, EPOCHS = 5, 10.0
"""Some hundred comparisons of a file are too few to hold some out: five models train on four fifths
each and judge together, and their accuracy counts every comparison once. One pass would be few
steps."""


def evaluate(policy: StageSpec) -> Callable[..., Path]:
    """The node function for a policy trained by the stage `policy`, such as PPO or DPO."""

    def node(
        split: Path,
        sft_model: Path,
        candidate_model: Path,
        reward_model: Path,
        trained: RewardModelConfig | None,
        policy_config: Any,
        data: SplitConfig,
        config: EvaluateConfig,
        seed: int,
        stages: Stages,
    ) -> Path:
        """Let both policies answer the same held-out prompts, and compare the answers."""
        inputs = {"prompts": split / "evaluation", SFT_ROWS: split / "sft", "sft_model": sft_model}
        inputs[f"{policy.name}_model"] = candidate_model
        if trained is not None:
            inputs["reward_model"] = reward_model
        if config.rewards_judge(trained):
            judges = as_judges(getattr(policy_config, "rewards", ()))
            config = config.model_copy(update={"judges": judges})
        config = config.with_episodes_of(policy_config)
        if config.judge_model is not None:
            assert trained is not None, "checked before the run"
            second = config.judge_model, trained, data, seed, stages
            inputs |= judge_models(split, sft_model, *second)
        if config.tasks is not None and policy is not CHAMPION:  # nothing reads what it achieves
            own = {"tasks": config.tasks, "evaluate": EvaluateConfig(precision=config.precision)}
            files = task_inputs(config.tasks)
            for place, model in (("baseline", sft_model), ("candidate", candidate_model)):
                job = Job(TASKS, own, {"policy": model, **files}, seed)
                inputs[f"{TASK_PREFIX}{place}"] = stages.run(job)
        blocks = {"evaluate": config, "candidate": CandidateConfig(name=policy.name)}
        return _judged(Job(SPEC.for_candidate(policy.name), blocks, inputs, seed), config, stages)

    return node


def judge_models(
    rows: Path,
    sft_model: Path,
    config: JudgeModelConfig,
    trained: RewardModelConfig,
    data: SplitConfig,
    seed: int,
    stages: Stages,
) -> dict[str, Path]:
    """Train a model with a scalar head on comparisons held back, or on those of a file: that of
    `reward_model.base_model`, or else the SFT model.

    Returns the models by the name of the input.
    """
    comparisons, epochs = rows / JUDGE_MODEL, config.epochs or trained.epochs
    own_base = reward_base(trained, data, seed, stages)
    start = {"sft_model": sft_model} if own_base is None else {"base_model": own_base}
    folds: list[dict[str, Block]] = [{}]
    if config.path is not None:
        nothing = dict.fromkeys(("held_back", "validation_fraction", "test_fraction"), 0.0)
        own = {"sources": (config.source,), "weights": (0.0, 1.0, 0.0), "pretraining": None}
        rows_of_file = data.model_copy(update=own | nothing)
        careful = split(own_base or sft_model, rows_of_file, None, seed, stages, JUDGE_SPLIT)
        comparisons, epochs = careful / "reward_model", config.epochs or EPOCHS
        folds = [{"fold": FoldConfig(number=number, of=FOLDS)} for number in range(FOLDS)]
    block: dict[str, Block] = {"reward_model": trained.model_copy(update={"epochs": epochs})}
    inputs = {"comparisons": comparisons} | start
    return {
        f"{JUDGE_MODEL}.{number}": stages.run(Job(JUDGE, block | fold, inputs, seed))
        for number, fold in enumerate(folds)
    }


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
    blocks = {"evaluate": config, "candidate": CandidateConfig(name=names[1], models=names)}
    return _judged(Job(MODELS, blocks, inputs, seed), config, stages)


def _judged(job: Job, config: EvaluateConfig, stages: Stages) -> Path:
    """Run an evaluation with the inputs of its judges."""
    judges, identities = reward_inputs(config.judges, JUDGE_PREFIX)
    spec = job.spec.answering_by(config.generator)
    inputs = {**job.inputs, **judges, **config.code_inputs()}
    return stages.run(replace(job, spec=spec, inputs=inputs, identities=identities))


def register(
    split: Path,
    sft_model: Path,
    candidate_model: Path,
    reward_model: Path,
    trained: RewardModelConfig | None,
    policy_config: Any,
    data: SplitConfig,
    evaluation: Path,
    workspace: str,
    config: RegisterConfig,
    judging: EvaluateConfig,
    seed: int,
    stages: Stages,
    project: Path,
) -> dict[str, Any]:
    """Register both policies in MLflow; promote the candidate if it passes the gate.

    The present champion answers the prompts of the evaluation before. Raises ArtifactError if an
    artifact is damaged.
    """
    for artifact in (sft_model, candidate_model, evaluation):
        verify(artifact)
    champion = find_champion(config.model, candidate_model, project, Path(workspace) / DOWNLOADS)
    answered = None
    if champion is not None and champion.folder is not None:
        models = sft_model, champion.folder, reward_model
        blocks = trained, policy_config, data, judging
        answered = evaluate(CHAMPION)(split, *models, *blocks, seed, stages)
    registration = register_evaluated(
        sft_model, candidate_model, evaluation, champion, answered, config, data.sources, project
    )
    return registration.record()


def report(
    evaluation: Path,
    registration: dict[str, Any],
    sft_model: Path,
    candidate_model: Path,
    reward_model: Path,
    workspace: str,
) -> str:
    """Make the page, after the registration: verdict, results, curves, every answer."""
    try:
        models = candidate_model, reward_model, sft_model
        return evaluation_page(evaluation, models, registration, Path(workspace))
    except Exception as error:
        raise PipelineError(
            f"page of {evaluation}: found {type(error).__name__} ({error}), expected a page. "
            "Models, evaluation and registration are complete. Fix: `kedro rlhf report` makes the "
            "page again"
        ) from error
