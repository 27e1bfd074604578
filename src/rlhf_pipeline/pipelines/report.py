from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.reporting.page import evaluation_page


def report(
    evaluation: Path,
    registration: dict[str, Any],
    sft_model: Path,
    candidate_model: Path,
    reward_model: Path,
) -> str:
    """Make the page, after the registration: verdict, results, curves, every answer."""
    try:
        return evaluation_page(evaluation, (candidate_model, reward_model, sft_model), registration)
    except Exception as error:
        raise PipelineError(
            f"page of {evaluation}: found {type(error).__name__} ({error}), expected a page. "
            "Models, evaluation and registration are complete. Fix: `kedro rlhf report` makes the "
            "page again"
        ) from error
