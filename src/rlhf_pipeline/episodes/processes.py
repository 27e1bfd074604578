"""The tools and the environment of the user, for each episode in a process of its own.

A server imports the code once. It forks a process for each episode, so that no episode sees what
another one has left behind, and what hangs or ends is one episode alone. The processes import this
module, so it imports no torch.
"""

import asyncio
import inspect
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from subprocess import Popen
from threading import Lock
from types import ModuleType
from typing import Any

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.runtime.user_code import end_with_parent, live_beside, loaded, start_beside

_PROGRAM = "from rlhf_pipeline.episodes.processes import serve; serve()"
LOAD_S = 120.0
"""Longest time for the imports of the user, in seconds."""
LONGEST_TEXT, LONGEST_REPLY = 100_000, 2**24
"""Characters of a reply, and bytes of a message from a process."""


class CallError(Exception):
    """A call raised an exception; if its process is `lost`, it took too long, or has ended."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class Server:
    """Forks the processes of the episodes; one for each rank.

    Args:
        place: the parameters, such as `grpo`, for messages.
        code: `FILE.py:NAME` or `MODULE:NAME` of tools and environment by parameter, as
            `EpisodesConfig.code` has them.
        arguments: `environment_arguments`.
    """

    def __init__(
        self,
        place: str,
        code: Mapping[str, str],
        arguments: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self.timeout_s, self._lock = timeout_s, Lock()
        self._process, self._pipe = start_beside(_PROGRAM)
        tools = {name: [f"{place}.{name}", *one.rsplit(":", 1)] for name, one in code.items()}
        environment = tools.pop("environment", None)
        own = [*tools.values()], environment, arguments
        self._pipe.send_bytes(json.dumps([sys.path, *own]).encode())
        self._schemas: list[dict[str, Any]] | None = None
        self._fault: StageError | None = None
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # each living episode has a pipe
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        self.stop = weakref.finalize(self, _stop, self._process)

    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools by transformers, once the code is imported.

        Raises StageError if an import fails, or a function has no type hints or descriptions.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            if self._schemas is None:
                try:
                    said = _received(self._pipe, LOAD_S, "the import of tools and environment")
                except CallError as error:
                    said = {"error": f"{error}. Fix: correct what happens in the import"}
                if "error" in said:
                    self._fault = StageError(said["error"])
                    raise self._fault
                self._schemas = said["ok"]
            return self._schemas

    def episode(self, seed: Sequence[int]) -> "EpisodeProcess":
        """A process for an episode, with randomness of its own."""
        self.schemas()
        try:
            ours, theirs = Pipe()
            with self._lock, theirs:
                self._pipe.send_bytes(b"null")
                reduction.send_handle(self._pipe, theirs.fileno(), self._process.pid)
                number = json.loads(self._pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise StageError(
                f"tools, environment: found {type(error).__name__} ({error}), expected a process "
                "for an episode. Fix: see the log above, and whether memory or files ran out"
            ) from None
        return EpisodeProcess(ours, self.timeout_s, seed, partial(self._end, number))

    def _end(self, number: int) -> None:
        with self._lock, suppress(OSError):
            self._pipe.send_bytes(json.dumps(number).encode())


def _stop(process: Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class EpisodeProcess:
    """The rank's end of an episode's process; `close` ends it, and all that it has started."""

    def __init__(
        self, pipe: Connection, timeout_s: float, seed: Sequence[int], end: Callable[[], None]
    ) -> None:
        self._pipe, self._timeout_s = pipe, timeout_s
        self.close = weakref.finalize(self, end)
        self._send(["seed", [int(word) for word in seed]])

    def ask(self, *message: Any) -> Any:
        """Call a tool ("call", name, arguments), or a method of the environment ("reset", task;
        "step", text). Raises CallError."""
        self._send(message)
        said = _received(self._pipe, self._timeout_s, f"the {message[0]}")
        if "error" in said:
            raise CallError(said["error"])
        return said["ok"]

    def _send(self, message: Sequence[Any]) -> None:
        with suppress(OSError):  # the process has ended: its reply is missing
            self._pipe.send_bytes(json.dumps(message).encode())


def _received(pipe: Connection, limit_s: float, what: str) -> dict[str, Any]:
    with socket.socket(fileno=os.dup(pipe.fileno())) as each:  # a message may be a part of one
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ceil(limit_s), 0))
    try:
        if not pipe.poll(limit_s):
            raise CallError(f"{what} took longer than {limit_s:g} s", lost=True)
        said = json.loads(pipe.recv_bytes(LONGEST_REPLY))
    except (EOFError, OSError):
        raise CallError(f"{what} ended its process", lost=True) from None
    except (ValueError, RecursionError):  # the user's code has written into the pipe
        said = None
    if not isinstance(said, dict):
        raise CallError(f"{what} sent no reply", lost=True)
    return said


def serve() -> None:
    """The program of the server."""
    live_beside()
    pipe, children = Connection(int(sys.argv[1])), set[int]()
    sys.path, tools, environment, arguments = json.loads(pipe.recv_bytes())
    try:
        modules = dict[str, ModuleType]()  # functions of one file share its state
        functions = {name: loaded(place, file, name, modules) for place, file, name in tools}
        place, file, name = environment or ("", "", "")
        make = loaded(place, file, name, modules) if environment else None
        said: dict[str, Any] = {"ok": _schemas(functions, [place for place, *_ in tools])}
    except StageError as error:
        said = {"error": error.message}
    pipe.send_bytes(json.dumps(said).encode())
    with suppress(EOFError):  # the rank has ended
        while True:
            ended = json.loads(pipe.recv_bytes())
            if ended is None:
                descriptor = reduction.recv_handle(pipe)
                if (child := os.fork()) == 0:
                    os.setsid()
                    end_with_parent()
                    # What a tool forks obeys its signals, also those that come at once.
                    block, free = (partial(_mask, how) for how in ("BLOCK", "UNBLOCK"))
                    os.register_at_fork(before=block, after_in_parent=free, after_in_child=_obey)
                    pipe.close()
                    _play(Connection(descriptor), functions, make, arguments)
                    os._exit(0)
                os.close(descriptor)
                children.add(child)
                pipe.send_bytes(json.dumps(child).encode())
            elif ended in children:
                children.discard(ended)
                for kill in os.killpg, os.kill:  # before it is a session, it has no group
                    with suppress(ProcessLookupError):
                        kill(ended, signal.SIGKILL)
                os.waitpid(ended, 0)


def _mask(how: str) -> None:
    signal.pthread_sigmask(getattr(signal, f"SIG_{how}"), (signal.SIGTERM, signal.SIGINT))


def _obey() -> None:
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
    _mask("UNBLOCK")


def _schemas(functions: Mapping[str, Callable[..., Any]], places: Sequence[str]) -> list[Any]:
    """In a fork, for transformers needs a second and hundreds of megabytes."""
    if not functions:
        return []
    ours, theirs = Pipe()
    if os.fork() == 0:
        from transformers.utils import get_json_schema

        said: dict[str, Any] = {"ok": []}
        for place, function in zip(places, functions.values(), strict=True):
            try:
                said["ok"].append(get_json_schema(function))
            except Exception as error:
                said = {
                    "error": f"{place}: found {error}, expected type hints, and a docstring with "
                    "the lines `Args:` and `NAME: what it is` for each argument. Fix: add them"
                }
                break
        theirs.send_bytes(json.dumps(said).encode())
        os._exit(0)
    theirs.close()
    said = _received(ours, LOAD_S, "the import of transformers")
    os.wait()
    if "error" in said:
        raise StageError(said["error"])
    found: list[Any] = said["ok"]
    return found


def _play(
    pipe: Connection,
    functions: Mapping[str, Callable[..., Any]],
    make: Callable[..., Any] | None,
    arguments: Mapping[str, Any],
) -> None:
    """The program of an episode: answer each message, until the rank closes the pipe."""
    environment, own = None, os.getpid()
    _, seed = json.loads(pipe.recv_bytes())
    random.seed(str(seed))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    with suppress(EOFError):
        while True:
            kind, *given = json.loads(pipe.recv_bytes())
            value: Any
            try:
                if kind == "reset":
                    assert make is not None, "the rank knows whether there is an environment"
                    offered = {"seed": random.getrandbits(63), "environment_arguments": arguments}
                    offered |= arguments
                    named = inspect.signature(make).parameters
                    environment = make(**{k: v for k, v in offered.items() if k in named})
                    value = _messages(_value(environment.reset(*given)))
                elif kind == "step":
                    assert environment is not None, "a reset comes first"
                    messages, reward, done = _value(environment.step(*given))
                    value = [_messages(messages), float(reward), bool(done)]
                else:
                    name, named_arguments = given
                    value = _text(_value(functions[name](**named_arguments)))
                said = json.dumps({"ok": value})
            except BaseException as error:  # of the user's code, SystemExit included
                said = json.dumps({"error": _text(f"{type(error).__name__}: {error}")})
            if os.getpid() != own:  # a fork that the call has left behind
                os._exit(0)
            pipe.send_bytes(said.encode())


def _value(found: Any) -> Any:
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _text(found: Any) -> str:
    text = found if isinstance(found, str) else json.dumps(found, default=str, ensure_ascii=False)
    return text[:LONGEST_TEXT]


def _messages(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages = [{"role": str(one["role"]), "content": _text(one["content"])} for one in found]
    tools = found[0].get("tools") if found else None  # schemas, for the template
    return [messages[0] | {"tools": tools}, *messages[1:]] if tools else messages
