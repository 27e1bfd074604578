"""How code of the user is imported, by a file or by a module, and how programs beside a rank, which
run it, start and live."""

import ctypes
import importlib
import importlib.util
import inspect
import signal
import sys
import zlib
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen
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


def start_beside(program: str) -> tuple["Popen[bytes]", Connection]:
    """Start a program in Python code, in a session of its own; its process, and the rank's end of a
    pipe. The program gets the descriptor of its own end as its argument."""
    ours, theirs = Pipe()
    with theirs:
        # A program of its own: no fork survives the threads and devices of a rank.
        command = [sys.executable, "-P", "-c", program, str(theirs.fileno())]
        how: Any = {"pass_fds": [theirs.fileno()], "start_new_session": True}
        return Popen(command, stdin=DEVNULL, **how), ours


def live_beside() -> None:
    """Let this program end with the process that has started it, and not by a scheduler's signals:
    the rank decides when it ends."""
    end_with_parent()
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda *_: None)


def end_with_parent() -> None:
    """Let this process end when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PDEATHSIG
