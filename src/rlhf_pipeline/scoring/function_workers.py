"""A reward function of the user: how it is imported and called, here or in processes of its own.

The processes import this module, so it imports no torch.
"""

import asyncio
import inspect
import math
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any, NamedTuple

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.user_code import live_beside, loaded, start_beside

_PROGRAM = "from rlhf_pipeline.scoring.function_workers import work; work()"
LONGEST_TEXT = 2000  # characters of a fault


class Call(NamedTuple):
    """Arguments of a function: prompts, responses, and further ones by name."""

    prompts: list[Any]
    responses: list[str]
    more: dict[str, Any]

    def row(self, row: int) -> "Call":
        """The call for one response alone."""
        more = {name: column[row : row + 1] for name, column in self.more.items()}
        return Call(self.prompts[row : row + 1], self.responses[row : row + 1], more)


class ResultError(StageError):
    """A function returned something else than one finite number for each response."""


def scores(place: str, function: Callable[..., Any], call: Call) -> list[float]:
    """The numbers for the responses; StageError, which names `place` and if possible the response,
    if the function fails or returns something else."""
    try:
        return _results(function, call)
    except ResultError as error:
        fix = "Fix: return one finite number for each response"
        raise StageError(f"{place}: {error.message}. {fix}") from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        where = _where(function, call)
        raise StageError(f"{place} failed {where}: {_described(error)}") from error


def _where(function: Callable[..., Any], call: Call) -> str:
    """The first row on which the function also fails alone, for the message."""
    rows = 0 if "scored" in call.more else len(call.responses)  # tokens are not by row
    for one in map(call.row, range(rows)):
        if rows == 1 or _fails(function, one):
            return f"at {_row(one.prompts[0], one.responses[0])}"
    return f"at {len(call.prompts)} responses together, the first to the prompt {call.prompts[0]}"


def _fails(function: Callable[..., Any], call: Call) -> bool:
    try:
        _results(function, call)
    except (Exception, SystemExit, asyncio.CancelledError):  # a user's function may raise anything
        return True
    return False


def _row(prompt: Any, response: str) -> str:
    return f"the response {response!r} to the prompt {prompt}"


def _results(function: Callable[..., Any], call: Call) -> list[float]:
    """The finite number for each response. The function may be async. Raises ResultError."""
    rows = [*zip(call.prompts, call.responses, strict=True)]  # the function may empty its lists
    result = function(call.prompts, call.responses, **call.more)
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    iterator = None
    with suppress(TypeError):  # a number, None, or a tensor without a dimension
        iterator = None if isinstance(result, str | bytes | Mapping | Set) else iter(result)
    items = None if iterator is None else [*iterator]  # a generator may fail by itself
    if items is None or len(items) != len(rows):
        found = _shown(result) if items is None else f"{len(items)} results"
        expected = f"a list of {len(rows)} numbers, one for each response"
        if len(rows) == 1:
            expected = f"a list of one number, for {_row(*rows[0])}"
        raise ResultError(f"found {found}, expected {expected}")
    numbers = [_number(item) for item in items]
    for row, item, number in zip(rows, items, numbers, strict=True):
        if not math.isfinite(number):
            raise ResultError(f"found {_shown(item)}, expected a finite number, for {_row(*row)}")
    return numbers


def _shown(result: Any) -> str:
    with suppress(Exception):  # of a method of the user
        return repr(result)[:LONGEST_TEXT]
    return f"an object of the type {type(result).__name__}"


def _number(item: Any) -> float:
    """An item of a result as a number; NaN for what is none, such as a text of digits."""
    with suppress(Exception):  # a tensor of two numbers, an integer that is too large
        return math.nan if isinstance(item, str | bytes) else float(item)
    return math.nan


def _described(error: BaseException) -> str:
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
        self.place, self.timeout_s = place, timeout_s
        workers = [_Worker(place, location, name) for _ in range(processes)]
        self._idle: Queue[_Worker] = Queue()
        for worker in workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes)  # each waits for one process
        self.stop = weakref.finalize(self, _stop, workers)

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        """The number of each call, which has one response.

        Raises StageError if a call takes longer than `timeout_s`, fails, ends its process, or does
        not return one finite number. All processes then end.
        """
        try:
            numbers = [self._threads.submit(self._number, call) for call in calls]
            for number in as_completed(numbers):
                heartbeat.report_progress()
                number.result()
            return [number.result() for number in numbers]
        except BaseException:
            self.stop()
            raise

    def _number(self, call: Call) -> float:
        worker, row = self._idle.get(), _row(call.prompts[0], call.responses[0])
        try:
            worker.receive(None)  # it is ready: the limit is that of the call alone
            worker.pipe.send(call)
            result: float | str = worker.receive(self.timeout_s)
        except TimeoutError:
            result = f"{self.place} took longer than {self.timeout_s:g} s (timeout_s) at {row}"
        except (EOFError, OSError):
            code = worker.process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            result = f"{self.place} ended its process {how} at {row}"
        finally:
            self._idle.put(worker)
        if isinstance(result, str):
            raise StageError(result)
        return result


class _Worker:
    """A process that calls the function, and the rank's end of its pipe."""

    def __init__(self, *function: str) -> None:
        self.process, self.pipe = start_beside(_PROGRAM)
        self.pipe.send((sys.path, function))

    def receive(self, limit_s: float | None) -> Any:
        """The next message. Raises TimeoutError, and EOFError if the process has ended: what it
        has started may keep the pipe open."""
        deadline = time.monotonic() + (math.inf if limit_s is None else limit_s)
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            with suppress(EOFError, OSError):  # it closed the pipe: it ends, or hangs
                if self.pipe.poll(0.1):
                    return self.pipe.recv()
        raise EOFError


def work() -> None:
    """The program of a process: for each call, it sends None when it is ready, and then the number
    or a fault: objects and errors of the user may not survive the way back."""
    live_beside()
    pipe, own = Connection(int(sys.argv[1])), os.getpid()
    with suppress(EOFError):  # the rank has ended
        sys.path, (place, location, name) = pipe.recv()
        function = loaded(place, location, name)
        while True:
            pipe.send(None)
            result: float | str
            call = pipe.recv()
            try:
                (result,) = scores(place, function, call)
            except StageError as error:
                result = error.message
            except BaseException as error:  # of another language, for example
                result = f"{place} failed: {_described(error)}"
            if os.getpid() != own:  # a fork that the function has left behind
                os._exit(0)
            pipe.send(result)


def _stop(workers: Sequence[_Worker]) -> None:
    """End the processes and those that they have started, but for sessions of their own: these end
    with the launch of the stage."""
    for worker in workers:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
