"""The node that makes the page of an evaluation."""

from pathlib import Path
from typing import Any

from rlhf_pipeline.reporting.page import evaluation_page


def report(
    evaluation: Path,
    registration: dict[str, Any],
    candidate_model: Path,
    reward_model: Path,
    sft_model: Path,
) -> str:
    """Make the page: verdict, results, curves of the trainings, every answer."""
    return evaluation_page(evaluation, (candidate_model, reward_model, sft_model), registration)
