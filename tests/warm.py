"""A warm template: programs of tests are forks of one process, instead of cold starts.

A rank imports torch, transformers and DeepSpeed for more than three core seconds before it does
anything. The template imports them once, then forks for each program that the tests launch. A fork
is a real process: it has its own session and group, signal mask, environment (also in `/proc`),
output, working folder and exit code, and the ranks are children of their launcher. All workers of
pytest-xdist share the template. Without them, and in tests marked `cold`, programs start as users
start them.

As a program, this file is the template, which listens at a socket.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

IMPORTS = (
    "deepspeed.launcher.launch",
    "kedro.framework.cli.cli",
    "kedro.framework.session",
    "kedro.runner",
    "mlflow.store.tracking.sqlalchemy_store",
    "peft",
    "rlhf_pipeline.data.source",
    "rlhf_pipeline.data.split",
    "rlhf_pipeline.evaluation.evaluate",
    "rlhf_pipeline.models.base_model",
    "rlhf_pipeline.stages.launch.node_program",
    "rlhf_pipeline.training.dpo",
    "rlhf_pipeline.training.ppo",
    "rlhf_pipeline.training.reward_model",
    "rlhf_pipeline.training.sft",
)
"""What most programs import, and `kedro`."""
LAUNCHER = "rlhf_pipeline.distributed.node_launcher"
READ_AT_IMPORT = re.compile(
    "HF_(HOME|HUB|ENDPOINT)|TRANSFORMERS_|TORCH_|DS_|LD_|PYTHON(PROFILE|WARN)"
)
"""Variables that a library reads when it is imported."""
RESERVE = "x" * 60_000
"""The room of a fork's own environment, as an argument and a variable of the template."""
MAXIMUM = 200_000
"""Bytes of a request."""


BEFORE = dict(os.environ)
"""The environment of this process before any test."""
address = ""
"""Where the template listens; empty: every program is cold."""


class Program:
    """A fork of the template, with the methods of `subprocess.Popen` that launches use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._reply()

    def poll(self) -> int | None:
        """The exit code, or None while the program runs."""
        if self.returncode is None:
            self._connection.setblocking(False)
            with suppress(BlockingIOError):
                self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when the program has ended."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self._end()
        return self.returncode

    def _end(self) -> None:
        self.returncode = self._reply()
        self._connection.close()

    def _reply(self) -> int:
        if not (packet := self._connection.recv(MAXIMUM)):
            raise RuntimeError("the tests' warm template has ended")
        return json.loads(packet)


def program(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Sequence[int],
    *,
    folder: str | Path = ".",
    session: bool = False,
) -> Program | None:
    """Start a command with its standard input, output and errors; None: it must be cold."""
    is_python = command[0] == sys.executable or Path(command[0]).name == "kedro"
    if not (address and is_python and _is_usual(environment)):
        return None
    while not Path(address).exists():
        time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {
        "command": [str(part) for part in command],
        "environment": dict(environment),
        "folder": str(Path(folder).resolve()),
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "session": session,
    }
    socket.send_fds(connection, [json.dumps(request).encode()], list(output))
    return Program(connection)


def output_of(
    command: Sequence[str], environment: Mapping[str, str], folder: str | Path = "."
) -> tuple[int, str]:
    """Run a command to its end; its exit code, and what it wrote to its output and its errors."""
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile() as written,
        tempfile.TemporaryFile() as errors,
    ):
        files = (nothing, written, errors)
        started = program(command, environment, [each.fileno() for each in files], folder=folder)
        process = started or subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=nothing, stdout=written, stderr=errors
        )
        code = process.wait(timeout=1800)  # only for a program that hangs
        for file in files[1:]:
            file.seek(0)
        return code, (written.read() + errors.read()).decode()


def start(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> "Program | subprocess.Popen[bytes]":
    """A replacement of `stages.processes.start` for the programs of stages."""
    from rlhf_pipeline.stages import processes

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with Path(os.devnull).open() as nothing:
            output = [nothing.fileno(), *[options["stdout"].fileno()] * 2]
            warm = program(command, environment, output, session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return warm or processes.start(command, environment, **options)


def open_template(folder: Path, owner: int) -> None:
    """Start a template that lives as long as the process `owner`, unless another worker has."""
    global address
    address = str(folder / "warm")
    environment = BEFORE | {
        **{"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        **{"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", "RESERVE": RESERVE},
    }
    with suppress(FileExistsError):
        (folder / "warm.started").touch(exist_ok=False)
        command = [sys.executable, __file__, address, str(owner), RESERVE[:4000]]
        subprocess.run(command, env=environment, start_new_session=True, check=True)


def _is_usual(environment: Mapping[str, str]) -> bool:
    """Whether a cold start would import the same libraries in the same way."""
    differ = {
        name for name, _ in environment.items() ^ BEFORE.items() if READ_AT_IMPORT.match(name)
    }
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    return (
        differ <= {"DS_ACCELERATOR"}
        and environment.get("DS_ACCELERATOR", "cpu") == "cpu"
        and not any(Path(place, "sitecustomize.py").exists() for place in places)
    )


def serve(owner: int) -> None:
    """Fork for each request, and tell its sender the process and at its end the exit code."""
    for name in IMPORTS:
        importlib.import_module(name)
    sys.modules["rlhf_pipeline.stages.launch.node_program"].start = start
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address + ".new")
    listener.listen()
    Path(address + ".new").rename(address)
    ends = selectors.DefaultSelector()
    ends.register(listener, selectors.EVENT_READ)
    ends.register(os.pidfd_open(owner), selectors.EVENT_READ)
    while True:
        for key, _ in ends.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                packet, output, *_ = socket.recv_fds(connection, MAXIMUM, 3)
                if (process := os.fork()) == 0:
                    become(json.loads(packet), output)
                for descriptor in output:
                    os.close(descriptor)
                ends.register(os.pidfd_open(process), selectors.EVENT_READ, (process, connection))
                _tell(connection, process)
            elif key.data is None:
                return
            else:
                ends.unregister(key.fileobj)
                os.close(key.fd)
                process, connection = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                _tell(connection, code)
                connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the sender of the request was killed
        connection.send(json.dumps(number).encode())


def become(request: Mapping[str, Any], output: Sequence[int]) -> NoReturn:
    """Turn this fork into the program of a request, and run it to its end."""
    if request["session"]:
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number, descriptor in enumerate(output):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.chdir(request["folder"])
    run(request["command"], request["environment"])


def run(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a command in this fork, with the environment and the exit code of a cold start."""
    os.environ.clear()
    os.environ.update(environment)
    _show(command, environment)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    unbuffered = "PYTHONUNBUFFERED" in environment or "-u" in command
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=unbuffered)
    tempfile.tempdir = None
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    code = 1
    try:
        _execute(command[0], list(dropwhile(lambda part: part in ("-P", "-u"), command[1:])))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(program: str, arguments: list[str]) -> None:
    if Path(program).name == "kedro":
        from kedro.framework.cli import main

        sys.argv = [program, *arguments]
        main()
    elif arguments[:2] == ["-m", LAUNCHER]:
        from deepspeed.launcher import launch

        launch.subprocess = SimpleNamespace(Popen=Rank)
        sys.argv = arguments[1:]
        launch.main()
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Rank:
    """A fork of a launcher, with what DeepSpeed's launcher uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            run(command, env)

    def poll(self) -> int | None:
        """The exit code, or None while the rank runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let `/proc` show the program's own command and environment, as of one that was started."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    argument_start, argument_end, start, end = map(int, numbers[45:49])
    variables = [f"{name}={value}" for name, value in environment.items()]
    for first, last, texts in ((argument_start, argument_end, command), (start, end, variables)):
        block = b"".join(text.encode() + b"\0" for text in texts)[: last - first - 1]
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, block, len(block))


if __name__ == "__main__":
    address = sys.argv[1]
    if os.fork() == 0:  # a child of no worker: tests end all children of theirs
        serve(int(sys.argv[2]))
