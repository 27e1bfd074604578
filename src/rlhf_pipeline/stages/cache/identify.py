"""The run of a job: its recipe, its fingerprint and its work directory."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stages.cache.fingerprint import fingerprint, recipe
from rlhf_pipeline.stages.cache.workspace import attempts, first_attempt
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.launch.resources import process_count


def identify(job: Job, digests: Mapping[str, str], context: RunContext) -> StageRun:
    """The run of a job, in the directory of its first attempt.

    With `launch.continue_from`, a stage that ran on that number of ranks keeps its fingerprint.

    Args:
        job: the stage to run.
        digests: content digest of each local input, identity of each other input.
        context: workspace, number of ranks, trust.
    """
    run = _identify(job, digests, context, process_count(context.launch))
    if context.launch.continue_from is None or attempts(run.directory):
        return run
    earlier = _identify(job, digests, context, context.launch.continue_from)
    return earlier if attempts(earlier.directory) else run


def _identify(
    job: Job, digests: Mapping[str, str], context: RunContext, processes: int
) -> StageRun:
    ingredients = recipe(
        job, digests=digests, processes=processes, trust_remote_code=context.trust_remote_code
    )
    key = fingerprint(ingredients)
    return StageRun(
        stage=job.stage,
        fingerprint=key,
        seed=job.seed,
        config=as_json(job.config),
        inputs=dict(job.inputs),
        digests=dict(digests),
        directory=first_attempt(context.workspace, job.stage, key),
        collective_timeout_s=context.launch.collective_timeout_s,
        versions=ingredients["versions"],
        trust_remote_code=context.trust_remote_code,
        headline_metrics=job.spec.headline_metrics,
        recipe=ingredients,
    )
