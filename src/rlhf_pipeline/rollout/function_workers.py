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
from collections.abc import Callable, Sequence
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
    more: dict[str, list[Any]]


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


def results(function: Callable[..., Any], call: Call) -> list[float | str]:
    """The result for each response as a finite number; what is none, as text. It may be async."""
    found = function(call.prompts, call.responses, **call.more)
    found = asyncio.run(found) if inspect.iscoroutine(found) else found
    return [_number(result) for result in list(found)]


def _number(result: Any) -> float | str:
    with suppress(Exception):  # of a method of the user, too
        found = math.nan if isinstance(result, str | bytes) else float(result)
        if math.isfinite(found):
            return found
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
        found = results(_function, call)
    except BaseException as error:
        return f"failed with {described(error)}"
    if len(found) != 1:
        return f"returned {len(found)} results, expected one,"
    return found[0] if isinstance(found[0], float) else f"returned {found[0]}, no finite number,"


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
