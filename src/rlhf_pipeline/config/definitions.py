"""What a name in a module means, read from its source: nothing is imported or executed.

A place is `package.module:name` or `path/to/file.py:name`.
"""

import ast
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import decode_source, resolve_name
from pathlib import Path

from rlhf_pipeline.errors import ConfigError

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_file(place: str) -> Path:
    """The source file of a place, found without importing its module or packages.

    Raises ConfigError if the file or the module does not exist.
    """
    location = place.rpartition(":")[0]
    if location.endswith(".py"):
        path = Path(location).expanduser()
        if not path.is_file():
            raise ConfigError(f"{place}: found no file {path.resolve()}")
        return path
    folders: Sequence[str] | None = None
    names = location.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or (depth < len(names) and spec.submodule_search_locations is None):
            raise ConfigError(
                f"{place}: found no module {location}. Fix: install it, add its folder to "
                "PYTHONPATH, or, for a reward or a judge, write FILE.py:FUNCTION"
            )
        folders, origin = spec.submodule_search_locations, spec.origin
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(
            f"{place}: found no Python source of module {location}, expected a "
            ".py file. Fix: wrap the function in a Python file"
        )
    return Path(origin)


def defined(place: str, method: str = "__init__") -> Function | None:
    """The function of a place, the `method` of a class, or the `__call__` of an instance, both
    without `self`; None if the source does not tell, as for `functools.partial`.

    Raises ConfigError if the source cannot be parsed, or does not define the name or the method.
    """
    location, _, name = place.rpartition(":")
    bound = _bound(place)
    if name not in bound:
        functions = sorted(name for name, by in bound.items() if isinstance(by, Function))
        raise ConfigError(
            f"{place}: found functions {', '.join(functions) or 'none'} in "
            f"{source_file(place)}, expected {name}"
        )
    while True:
        match bound.pop(name, None):
            case ast.Assign(value=ast.Name(id=name)) | ast.AnnAssign(value=ast.Name(id=name)):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                return function
            case ast.ClassDef() as made:
                found = _method(made, method)
                if found is None and method != "__init__" and not made.bases:
                    raise ConfigError(f"{place}: found no method {method}, expected one")
                return found
            case ast.ImportFrom(names=names, level=level) as statement:
                name = [one.name for one in names if name == (one.asname or one.name)][-1]
                module = "." * level + (statement.module or "")
                is_package = source_file(place).name == "__init__.py"
                package = location if is_package else location.rpartition(".")[0]
                # Two modules may import the name from each other.
                with suppress(ConfigError, ImportError, RecursionError):
                    return defined(f"{resolve_name(module, package)}:{name}", method)
            case ast.Assign(value=ast.Call(func=ast.Name(id=made_by))):
                return _method(bound.get(made_by), "__call__")
        return None


def parameters(function: Function | None) -> set[str]:
    """The names of a function's parameters."""
    arguments = ast.walk(function.args) if function else ()
    return {one.arg for one in arguments if isinstance(one, ast.arg)}


def signature(function: Function | None) -> inspect.Signature | None:
    """The signature of a function; None under a decorator, which may change it."""
    if function is None or function.decorator_list:
        return None
    given = function.args
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "signature", "eval")))  # noqa: S307


def _bound(place: str) -> dict[str, ast.stmt]:
    """The last statement of the module that binds each of its names."""
    path, bound = source_file(place), {}
    try:
        statements = ast.parse(decode_source(path.read_bytes())).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{place}: {path} is not Python source: {error}") from None
    for statement in statements:
        is_scope = isinstance(statement, Function | ast.ClassDef)
        for node in [statement] if is_scope else ast.walk(statement):
            stored = isinstance(getattr(node, "ctx", None), ast.Store) and getattr(node, "id", None)
            if name := getattr(node, "asname", None) or getattr(node, "name", None) or stored:
                bound[name] = statement
    return bound


def _method(made: ast.stmt | None, name: str) -> Function | None:
    for method in made.body if isinstance(made, ast.ClassDef) else ():
        if isinstance(method, Function) and method.name == name:
            del (method.args.posonlyargs or method.args.args)[:1]
            return method
    return None
