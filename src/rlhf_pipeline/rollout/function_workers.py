"""A reward function of the user: how it is imported and called, here or in processes of its own.

The processes import this module, so it imports no torch.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
from pebble import ProcessExpired, ProcessPool

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat

MARK = "RLHF_REWARD_WORKERS"
"""Environment variable of the processes of one function. Whatever they start has it, too."""
LONGEST_TEXT, WATCH_S, LOOKS = 2000, 0.1, 10
"""Characters of a fault: what a pipe takes at once. Seconds between looks at the processes, and
looks until one counts as lost."""


class Call(NamedTuple):
    """Arguments of a function: prompts, responses, and further ones by name."""

    prompts: list[Any]
    responses: list[str]
    more: dict[str, Any]

    def row(self, row: int) -> "Call":
        """The call for one response alone; `more` has lists."""
        more = {name: column[row : row + 1] for name, column in self.more.items()}
        return Call(self.prompts[row : row + 1], self.responses[row : row + 1], more)


class ResultError(StageError):
    """A function returned something else than one finite number for each response."""


def imported(location: str, name: str) -> Any:
    """What is called `name` in the file `*.py` or in the module."""
    path = Path(location)
    if path.suffix != ".py":
        return getattr(importlib.import_module(location), name)
    spec = importlib.util.spec_from_file_location(f"ppo_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "preflight rejects files that are not .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return getattr(module, name)


def loaded(place: str, location: str, name: str) -> Callable[..., Any]:
    """The function `imported`; StageError, which names `place`, if that fails or it is none."""
    try:
        function = imported(location, name)
    except Exception as error:
        raise StageError(
            f"{place} cannot be imported: {type(error).__name__}: {error}. "
            "Fix: correct it; add the folders of its modules to PYTHONPATH, also the working folder"
        ) from error
    if not callable(function):
        raise StageError(f"{place} is {function!r}, not a function")
    return function


def scores(place: str, function: Callable[..., Any], call: Call) -> list[float]:
    """The numbers for the responses; StageError, which names `place` and if possible the response,
    if the function fails or returns something else."""
    try:
        return results(function, call)
    except ResultError as error:
        fix = "Fix: return one finite number for each response"
        raise StageError(f"{place}: {error.message}. {fix}") from error
    except Exception as error:
        where = _where(function, call)
        raise StageError(f"{place} failed {where}: {described(error)}") from error


def _where(function: Callable[..., Any], call: Call) -> str:
    """The first row on which the function also fails alone, for the message."""
    for row in range(0 if "scored" in call.more else len(call.responses)):  # tokens are not by row
        one = call.row(row)
        try:
            results(function, one)
        except Exception:  # the user's function may raise anything
            return f"at the response {one.responses[0]!r} to the prompt {one.prompts[0]}"
    return f"at {len(call.prompts)} responses together, the first to the prompt {call.prompts[0]}"


def results(function: Callable[..., Any], call: Call) -> list[float]:
    """The finite number for each response. The function may be async. Raises ResultError."""
    prompts, responses = [*call.prompts], [*call.responses]  # the function may change its own
    found = function(call.prompts, call.responses, **call.more)
    found = asyncio.run(found) if inspect.iscoroutine(found) else found
    count, each = len(responses), None
    with suppress(TypeError):  # a number, None, or a tensor without a dimension
        each = None if isinstance(found, str | bytes | Mapping | Set) else iter(found)
    if each is None:
        what = f"{count} numbers, one for each response" if count > 1 else "one number"
        raise ResultError(f"found {_shown(found)}, expected a list of {what}")
    if len(listed := [*each]) != count:
        what = f"{count}, one for each response" if count > 1 else "one"
        raise ResultError(f"found {len(listed)} results, expected {what}")
    numbers = [*map(_number, listed)]
    for prompt, response, number, result in zip(prompts, responses, numbers, listed, strict=True):
        if number is None:
            row = f", for the response {response!r} to the prompt {prompt}" if count > 1 else ""
            raise ResultError(f"found {_shown(result)}, expected a finite number{row}")
    return [number for number in numbers if number is not None]


def _number(result: Any) -> float | None:
    with suppress(Exception):  # of a method of the user, too
        found = math.nan if isinstance(result, str | bytes) else float(result)
        return found if math.isfinite(found) else None
    return None


def _shown(result: Any) -> str:
    try:
        return repr(result)[:LONGEST_TEXT]
    except Exception:
        return f"an object of the type {type(result).__name__}"


def described(error: BaseException) -> str:
    """An error of a reward function with its place: the innermost one outside of libraries."""
    libraries, place = ("<", sys.prefix, sys.base_prefix), ""
    for frame in traceback.extract_tb(error.__traceback__)[2:]:
        if not frame.filename.startswith(libraries):
            place = f" ({frame.filename}, line {frame.lineno})"
    with suppress(Exception):  # of a method of the user
        return f"{type(error).__name__}: {error}"[:LONGEST_TEXT] + place
    return f"{type(error).__name__}{place}"


class Workers:
    """Processes that call a function with one response at a time."""

    def __init__(
        self, place: str, location: str, name: str, processes: int, timeout_s: float | None
    ) -> None:
        self.place, self.timeout_s, mark = place, timeout_s, uuid4().hex
        self._processes: list[_Worker] = []
        context: Any = SpawnContext()  # a rank has threads and devices, which no fork survives
        context.Process = partial(_Worker, self._processes, mark)
        self._pool = ProcessPool(processes, 0, _begin, (location, name), context)
        assert self._pool.active, "the property starts the processes"
        self.stop = weakref.finalize(self, _stop, self._pool, mark)

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        """The number of each call, which has one response.

        Raises StageError if a call takes longer than `timeout_s`, fails, ends its process, or does
        not return one finite number. All processes, and what they have started, then end.
        """
        try:
            of: dict[Future[float | str], Call] = {
                self._pool.schedule(_called, [call], {}, self.timeout_s): call for call in calls
            }
            waiting, looks = {*of}, 0
            while waiting:
                done, waiting = wait(waiting, WATCH_S, FIRST_COMPLETED)
                for future in (each for each in of if each in done):
                    heartbeat.tick()
                    if fault := self._fault(future):
                        raise self._error(fault, of[future])
                # Pebble does not report the end of a process with code 0, nor one in its first
                # moments, and starts another one. What it does report arrives within a second.
                looks = 0 if done or self._ended is None else looks + 1
                if looks == 1:
                    running = [of[each] for each in of if each.running()] or [*calls]
                if looks == LOOKS:
                    others = f", or at one of {len(running) - 1} others" if running[1:] else ""
                    raise self._error(f"{self._ended}", running[0], others)
            return [float(future.result()) for future in of]
        except BaseException:
            self.stop()
            raise

    @property
    def _ended(self) -> str | None:
        """How a process has ended; None: all of them run."""
        codes = [each.exitcode for each in self._processes if each.exitcode is not None]
        return _exit(codes[0]) if codes else None

    def _fault(self, future: Future[float | str]) -> str | None:
        """What is wrong with a call that is over."""
        match future.exception():
            case None:
                return found if isinstance(found := future.result(), str) else None
            case TimeoutError():
                return f"took longer than {self.timeout_s:g} s (timeout_s)"
            case ProcessExpired(exitcode=code):
                return _exit(code)
            case error:
                return self._ended or f"failed with {type(error).__name__}: {error}"

    def _error(self, fault: str, call: Call, others: str = "") -> StageError:
        (response,), (prompt,) = call.responses, call.prompts
        return StageError(
            f"{self.place} {fault} at the response {response!r} to the prompt {prompt}{others}"
        )


def _exit(code: int) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return f"ended its process {how}"


class _Worker(SpawnProcess):
    """A process that does not import the program of the rank, and has a mark."""

    def __init__(self, started: list["_Worker"], mark: str, **options: Any) -> None:
        super().__init__(**options)
        self.mark = mark
        started.append(self)

    def start(self) -> None:
        resource_tracker.ensure_running()  # before the mark: it is a process of the rank
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        os.environ[MARK] = self.mark
        try:
            super().start()
        finally:
            del os.environ[MARK]
            sys.modules["__main__"] = main


_function: Callable[..., Any]


def _begin(location: str, name: str) -> None:
    global _function
    # A scheduler sends SIGTERM to every process: the rank decides when its processes end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _function = imported(location, name)


def _called(call: Call) -> float | str:
    """The number or a fault: objects and errors of the user may not survive the way back."""
    try:
        return results(_function, call)[0]
    except ResultError as error:
        return f"failed: {error.message},"
    except BaseException as error:
        return f"failed with {described(error)}"


def _stop(pool: ProcessPool, mark: str) -> None:
    """End the processes with a mark, and their children. It repeats while they start others."""
    pool.stop()
    marked: list[psutil.Process] = [psutil.Process()]
    while marked:
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it belongs to another user or has ended
                if process.environ().get(MARK) == mark:
                    marked += [process, *process.children(recursive=True)]
        for process in marked:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)  # a killed process keeps its environment for a moment
    pool.join()
