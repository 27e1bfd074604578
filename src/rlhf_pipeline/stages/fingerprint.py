"""The fingerprint of a recipe: equal fingerprints give equal results, so a finished one is never trained again."""

from __future__ import annotations

import ast
import atexit
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.stages.job import Job, Program
from rlhf_pipeline.stages.trust import trusts_remote_code

PACKAGE = "rlhf_pipeline"
ROOT = Path(rlhf_pipeline.__file__).parent
MEMORY = ROOT / "__pycache__" / f"syntax.{sys.implementation.cache_tag}.json"
MOST_REMEMBERED = 4096
"""Texts, of a third of a kilobyte each; beyond that the memory begins anew."""


def recipe(job: Job, *, digests: Mapping[str, str], processes: int) -> dict[str, Any]:
    """Everything that decides a stage's result, as JSON.

    Args:
        job: the stage, its parameters and its seed; operational fields (ports, log intervals) do not count.
        digests: content digest of each input, identities of inputs that are no files among them.
        processes: ranks of a distributed stage; floating-point sums depend on their number.
    """
    return {
        "stage": job.stage,
        "seed": job.seed,
        "config": {name: block.recipe() for name, block in job.config.items()},
        "inputs": dict(digests),
        "code": code_digests(job.program.module, *job.modules),
        "versions": library_versions(job.program),
        "processes": processes if job.program.distributed else 1,
        **({"trust_remote_code": True} if trusts_remote_code() and "transformers" in job.program.libraries else {}),
    }


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def library_versions(program: Program) -> dict[str, str]:
    """Version of each library that can change a program's result."""
    return {name: _version(name) for name in program.libraries}


_version = cache(metadata.version)  # the stages share most of their libraries, too


def code_digests(*modules: str) -> dict[str, str]:
    """SHA-256 of the code of this package that a program can execute: its modules and all that they import from here, by file.

    Syntax trees are digested, not bytes: a comment or a line break trains nothing again.
    """
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in _closure(*modules).values()}
    return {name: _parsed(text)[0] for name, text in sorted(texts.items())}


def _closure(*modules: str) -> dict[str, Path]:
    """The modules and every module of this package that they import, directly or not: name to file."""
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
    """A module's digest, and the names in this package that it imports."""
    known, key = _memory(), hashlib.sha256(text.encode()).hexdigest()
    if key not in known:
        tree = ast.parse(text)
        known[key] = (hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(_imports(tree)))
    digest, imports = known[key]
    return digest, tuple(imports)


@cache
def _memory() -> dict[str, tuple[str, tuple[str, ...]]]:
    """What parsing found, by the text's SHA-256; kept beside Python's own caches, since a run that launches nothing would
    spend a tenth of its time on it."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    with suppress(OSError, ValueError):
        known.update(json.loads(MEMORY.read_text()))
    if len(known) > MOST_REMEMBERED:
        known.clear()
    if not sys.dont_write_bytecode:
        atexit.register(_remember, known, len(known))
    return known


def _remember(known: Mapping[str, Any], before: int) -> None:
    if len(known) > before:
        partial = MEMORY.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a package that may not be written to is parsed each time
            MEMORY.parent.mkdir(exist_ok=True)
            partial.write_text(json.dumps(known))
            partial.replace(MEMORY)


def _source(name: str) -> Path | None:
    """The file of a module of this package, found without importing it; None where `name` is a function or a class."""
    stem = ROOT.joinpath(*name.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node, at any depth; expressions, which are most of a tree, hold none."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, block, ()):
            yield statement
            yield from _statements(statement)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names in this package that a syntax tree imports, at the top or inside a function."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
