"""Nodes that compare a candidate policy with the SFT baseline, and register both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.evaluation import EvaluationConfig
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.config.registry import RegisterConfig
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.run import run_stage
from rlhf_pipeline.tracking.registry import register_evaluated


def evaluate(stage: str, candidate: str) -> Callable[..., Path]:
    """The node function that compares a candidate, "ppo" or "dpo", in a stage of that name."""

    def node(
        prepared_data: Path,
        sft_model: Path,
        candidate_model: Path,
        reward_model: Path,
        config: EvaluationConfig,
        launch: LaunchConfig,
        seed: int,
        workspace: Path,
    ) -> Path:
        """Let both policies answer the same held-out prompts, and compare."""
        inputs = {
            "prompts": prepared_data / "evaluation",
            "sft_model": sft_model,
            f"{candidate}_model": candidate_model,
            "reward_model": reward_model,
        }
        return run_stage(Job(stage, {"evaluate": config}, inputs, seed), launch, workspace)

    return node


def register(
    sft_model: Path, candidate_model: Path, evaluation: Path, config: RegisterConfig, project: Path
) -> dict[str, Any]:
    """Register both policies in MLflow; the candidate becomes the champion if it passes the gate."""
    return asdict(register_evaluated(sft_model, candidate_model, evaluation, config, project))
