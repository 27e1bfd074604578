from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.evaluate import EvaluateConfig, RegisterConfig
from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.config.training import RewardModelConfig
from rlhf_pipeline.pipelines.evaluate import CHAMPION, evaluate
from rlhf_pipeline.runtime.manifest import verify
from rlhf_pipeline.stages.cache.workspace import DOWNLOADS
from rlhf_pipeline.stages.job import Stages
from rlhf_pipeline.tracking.registration import register_evaluated
from rlhf_pipeline.tracking.registry import find_champion


def register(
    split: Path,
    sft_model: Path,
    candidate_model: Path,
    reward_model: Path,
    trained: RewardModelConfig | None,
    policy_config: Any,
    evaluation: Path,
    config: RegisterConfig,
    sources: SplitConfig,
    judging: EvaluateConfig,
    seed: int,
    stages: Stages,
    workspace: str,
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
        blocks = trained, policy_config, judging
        answered = evaluate(CHAMPION)(split, *models, *blocks, seed, stages)
    registration = register_evaluated(
        sft_model, candidate_model, evaluation, champion, answered, config, sources.sources, project
    )
    return asdict(registration)
