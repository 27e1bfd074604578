"""How code of the user is imported, by a file or by a module."""

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_pipeline.errors import StageError


def loaded(
    place: str, location: str, name: str, modules: dict[str, ModuleType] | None = None
) -> Callable[..., Any]:
    """The function `name` in the file `*.py` or in the module; StageError, which names `place`, if
    the import fails, or there is no such function."""
    try:
        module = (modules or {}).get(location) or _module(location)
        if modules is not None:
            modules[location] = module
        function = getattr(module, name, None)
    except StageError as error:  # one of our adapters lacks its package
        raise StageError(f"{place}: {error.message}") from None
    except Exception as error:
        raise StageError(
            f"{place} cannot be imported: {type(error).__name__}: {error}. "
            "Fix: correct it; add the folders of its modules to PYTHONPATH, also the working folder"
        ) from error
    if not callable(function):
        known = sorted(each for each, one in vars(module).items() if inspect.isroutine(one))
        raise StageError(
            f"{place}: found functions {', '.join(known) or 'none'} in {location}, "
            f"expected {name}. Fix: correct the name"
        )
    return function


def _module(location: str) -> ModuleType:
    path = Path(location).expanduser()
    if path.suffix != ".py":
        return importlib.import_module(location)
    name = f"code_{path.stem}_{zlib.crc32(bytes(path.resolve()))}"  # two files may have one stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a check rejects files that are not .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
