"""The fingerprint of a run. Runs with equal fingerprints have equal results (docs/cache.md says
where bit for bit), so a finished one is reused.

A recipe contains what can change a result: parameters except operational ones, inputs by content,
library versions, seed, number of ranks, and the code that the program imports, without docstrings,
comments and layout.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.doors import at_doors
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stages.cache.code import code_digests, library_version
from rlhf_pipeline.stages.cache.workspace import attempts, first_attempt
from rlhf_pipeline.stages.job import Job, RunContext, StageRun
from rlhf_pipeline.stages.launch.resources import gpu_count, rank_count

FORM = 2
"""Version of the recipe's form. Recipes of different forms cannot be compared."""
PACKAGES = {("kernels", "liger"): "liger_kernel", ("quantize", "nf4"): "bitsandbytes"}
"""Libraries that one value of a parameter uses, by the last part of its name and the value."""


def identify(job: Job, digests: Mapping[str, str], context: RunContext) -> StageRun:
    """The run of a job, in the directory of its first attempt.

    With `launch.continue_from`, a stage that ran on that number of ranks keeps its fingerprint.
    """
    run = _run(job, digests, context, rank_count(context.launch, gpu_count()))
    if context.launch.continue_from is None or attempts(run.directory):
        return run
    earlier = _run(job, digests, context, context.launch.continue_from)
    return earlier if attempts(earlier.directory) else run


def _run(job: Job, digests: Mapping[str, str], context: RunContext, processes: int) -> StageRun:
    ingredients = recipe(
        job,
        digests=digests,
        processes=processes,
        trust_remote_code=context.trust_remote_code,
        deterministic=context.launch.deterministic,
    )
    key = fingerprint(ingredients)
    return StageRun(
        stage=job.spec.name,
        fingerprint=key,
        seed=job.seed,
        config=as_json(job.config),
        inputs=dict(job.inputs),
        digests=dict(digests),
        directory=first_attempt(context.workspace, job.spec.name, key),
        collective_timeout_s=context.launch.collective_timeout_s,
        versions=ingredients["versions"],
        trust_remote_code=context.trust_remote_code,
        answers=context.progress.answers,
        mixture={name: list(changes) for name, changes in context.mixture.items()},
        headline_metrics=job.spec.headline_metrics,
        recipe=ingredients,
    )


def recipe(
    job: Job,
    *,
    digests: Mapping[str, str],
    processes: int,
    trust_remote_code: bool = False,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Everything that decides a stage's result, as JSON.

    `digests` are the content digest of each local input and the identity of each other input. The
    order of floating-point sums depends on the number of `processes`.
    """
    loads_models = "transformers" in job.spec.libraries
    doors = (found for block in job.config.values() for found in at_doors(block))
    named = [place.partition(":")[0] for _, _, place in doors]
    config = {name: block.recipe() for name, block in job.config.items()}
    values = [(name.rpartition(".")[2], value) for name, value in leaves(config)]
    used = [library for value, library in PACKAGES.items() if value in values]
    return {
        "form": FORM,
        "stage": job.spec.name,
        "seed": job.seed,
        "config": config,
        "inputs": dict(digests),
        "code": code_digests(job.spec.program, *job.modules, *named),
        "versions": {name: library_version(name) for name in (*job.spec.libraries, *used)},
        "processes": processes if job.spec.distributed else 1,
        **({"trust_remote_code": True} if trust_remote_code and loads_models else {}),
        **({"deterministic": True} if deterministic and job.spec.distributed else {}),
    }


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
