"""The pipelines of rlhf-pipeline, and those of this project."""

from kedro.pipeline import Pipeline

from rlhf_pipeline.pipeline_registry import register_pipelines as those_of_rlhf


def register_pipelines() -> dict[str, Pipeline]:
    """All pipelines by name; add your own."""
    return those_of_rlhf()
