"""The fingerprint of a recipe. Equal fingerprints give equal results: finished ones are reused.

A recipe contains what can change a result: parameters except operational ones, inputs by content,
library versions, seed, number of ranks, and the code that the program imports. It contains neither
docstrings, comments and layout nor the code of the driver.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.stages.job import Job

PACKAGE = "rlhf_pipeline"
ROOT = Path(rlhf_pipeline.__file__).parent

FORM = 2
"""Version of the recipe's form. Recipes of different forms cannot be compared."""


def recipe(
    job: Job, *, digests: Mapping[str, str], processes: int, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Everything that decides a stage's result, as JSON.

    Args:
        job: the stage, its parameters and its seed.
        digests: content digest of each local input, identity of each other input.
        processes: ranks of a distributed stage; the order of floating-point sums depends on it.
        trust_remote_code: whether Python code that ships with a model may run.
    """
    loads_models = "transformers" in job.spec.libraries
    return {
        "form": FORM,
        "stage": job.stage,
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


_version = cache(metadata.version)  # the stages share most of their libraries


def code_digests(*modules: str) -> dict[str, str]:
    """SHA-256 of the code of the modules and of all that they import from this package, by file."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in _closure(*modules).values()
    }
    return {name: _parsed(text)[0] for name, text in sorted(texts.items())}


def _closure(*modules: str) -> dict[str, Path]:
    """The modules and all modules of this package that they import, direct or not: name to file."""
    found: dict[str, Path] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        path = None if name in found else _source(name)
        if path is not None:
            found[name] = path
            pending.extend(_parsed(path.read_text())[1])
    return found


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
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False


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
