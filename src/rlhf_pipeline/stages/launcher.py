"""Starting a stage's program, watching it, and ending it with everything that it started."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, Interrupted, StageError
from rlhf_pipeline.stages import events, heartbeat
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.failure import LOG, Attempt, kernel_kills, stage_error
from rlhf_pipeline.stages.hints import PORT
from rlhf_pipeline.stages.job import Program
from rlhf_pipeline.stages.manifest import NAME
from rlhf_pipeline.stages.program import DRIVER, LAUNCH, driver_id, kill_strays, reserve_reasons
from rlhf_pipeline.stages.ranks import Ranks

logger = logging.getLogger(__name__)

POLL_S = 0.2
GRACE_S = 6.5
"""Seconds between the request to end, after which training finishes its step and saves, and the kill."""
FAILED_GRACE_S = 3.0
"""The same where a rank has failed: the others cannot finish their step without it."""
SETTLE_S = 1.5
"""Seconds from a rank's failure to the end of the others, in which they say what they have to say."""
ORPHANED_S = 3
"""Seconds that programs have to end themselves once the driver is gone."""
STACKS_S = 1.0
"""Seconds that ranks get to print what they are doing before a stuck stage is ended."""


def launch(program: Program, job_file: Path, run: StageRun, config: LaunchConfig, processes: int) -> None:
    """Run a program to its end, passing its metrics on as they appear.

    Success is exit code 0 *and* a manifest: DeepSpeed's runner exits with 0 when a child dies by a signal. If another
    program takes the port that was picked before the ranks do, they meet on another one.

    Raises:
        StageError: the program failed, or hung; `Interrupted`: INT, TERM or HUP reached this process.
    """
    try:
        _launch_once(program, job_file, run, config, processes)
    except StageError as error:
        if error.cause != PORT or config.master_port is not None:
            raise
        logger.warning("The port picked for stage %s was taken meanwhile; it is launched again on another", run.stage)
        _launch_once(program, job_file, run, config, processes)


def _launch_once(program: Program, job_file: Path, run: StageRun, config: LaunchConfig, processes: int) -> None:
    shutil.rmtree(run.directory / heartbeat.FOLDER, ignore_errors=True)  # of an earlier attempt
    reserve_reasons(run.directory, processes if program.distributed else 1)
    command = _command(program, job_file, config, processes)
    ranks = Ranks(run.directory, *((processes, config.hang_timeout_s) if program.distributed else (1, None)))
    environment = _environment(run.directory, processes)
    start, kills_before, stuck, grace_s = time.monotonic(), kernel_kills(), None, GRACE_S
    with _signals_raise(), (run.directory / LOG).open("wb") as output, _guard() as guarded:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # nobody answers a question: a library that asks is refused
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        guarded(process.pid)
        tail = _MetricsTail(run)
        try:
            while process.poll() is None and ranks.failed_s < SETTLE_S:
                time.sleep(POLL_S)
                tail.forward()
                ranks.look()
                if ranks.stuck:
                    stuck = f"no rank has made progress for {config.hang_timeout_s:g} s: {ranks.whereabouts()}"
                    ranks.ask_for_stacks()
                    time.sleep(STACKS_S)
                    break
            ranks.look()
            code, grace_s = process.poll(), FAILED_GRACE_S
            orphaned = code is not None and bool(ranks.alive)
        finally:
            try:
                _end_group(process, grace_s)
            finally:
                kill_strays(environment[LAUNCH])
                tail.forward()
    if code != 0 or not (run.export / NAME).is_file():
        kills = None if kills_before is None else (kernel_kills() or 0) - kills_before
        raise stage_error(
            Attempt(run, config, command, ranks, processes, code, orphaned, time.monotonic() - start, stuck, kills)
        )


def process_count(config: LaunchConfig) -> int:
    """Ranks on this machine: as configured, else one for each GPU, else two on a CPU."""
    return config.processes or gpu_count() or 2


def gpu_count() -> int:
    """GPUs that a launched program may use, counted without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.stdout.count("GPU ") if listing.returncode == 0 else 0


def free_port(configured: int | None) -> int:
    """The configured port, which must be free, or any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", configured or 0))
        except OSError:
            raise ConfigError(
                f"launch.master_port {configured} is in use; name another port, or null to have a free one picked"
            ) from None
        return int(probe.getsockname()[1])


def _command(program: Program, job_file: Path, config: LaunchConfig, processes: int) -> list[str]:
    if not program.distributed:
        return [sys.executable, "-m", program.module, str(job_file)]
    deepspeed = Path(sys.executable).with_name("deepspeed")
    port = free_port(config.master_port)
    options = ["--num_gpus", str(processes), "--master_port", str(port), "--no_local_rank", "--module"]
    return [str(deepspeed), *options, program.module, str(job_file)]


def _environment(directory: Path, processes: int) -> dict[str, str]:
    """The environment of a program: this package importable, MLflow not, threads shared out among the ranks."""
    guard = directory / "without_mlflow"  # DeepSpeed imports MLflow where it can, at seconds for each process
    guard.mkdir(exist_ok=True)
    (guard / "mlflow.py").write_text('raise ImportError("the launched programs know no MLflow")\n')
    source = Path(rlhf_pipeline.__file__).parent.parent
    paths = [str(guard), str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    # transformers asks a bot on the hub for a conversion, and takes what that made
    settings["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    settings[DRIVER] = str(driver_id(os.getpid()))
    settings[LAUNCH] = f"{settings[DRIVER]} {directory.resolve()}"
    if gpu_count() == 0:
        cores = len(os.sched_getaffinity(0))
        settings |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // processes))}
    return os.environ | settings


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn INT, TERM and HUP into `Interrupted`, an ordinary exception, so that everyone above can tidy up; under `nohup` a
    closed terminal is still ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(
            f"ended by {signal.Signals(number).name}; run the same command again: finished stages are kept"
        )

    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _guard() -> Iterator[Callable[[int], int]]:
    """Have a process group killed soon after this process is gone, by SIGKILL for example. Its programs see to that
    themselves, and to what left the group, but only when they have begun, and their imports take a while."""
    wait = "read -r group; read -r end"  # what is read last never comes
    command = ["sh", "-c", f'{wait}; sleep {ORPHANED_S}; kill -KILL "-$group"']
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True) as guard:
        assert guard.stdin is not None
        write = guard.stdin.write
        try:
            yield lambda group: write(f"{group}\n".encode())
        finally:
            guard.kill()


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the program's whole process group: ask, wait, kill. Ranks outlive their launcher otherwise.

    A further signal to this process, a second Ctrl-C say, ends the waiting, not the work.
    """
    again: Interrupted | None = None
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader, so that an empty group is seen as gone
                os.killpg(process.pid, 0)
                time.sleep(POLL_S / 4)
        except ProcessLookupError:
            break
        except Interrupted as error:
            again = error
    process.wait()
    if again is not None:
        raise again


class _MetricsTail:
    """Reads the metrics file as it grows and passes whole lines on."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._position = 0
        self._inode = 0

    def forward(self) -> None:
        if not self._run.metrics_file.is_file():
            return
        with self._run.metrics_file.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != self._inode:  # a program that goes on from a checkpoint replaced it
                self._inode, self._position = os.fstat(file.fileno()).st_ino, 0
            file.seek(self._position)
            grown = file.read()
        whole = grown[: grown.rfind(b"\n") + 1]
        self._position += len(whole)
        records: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        if records:
            events.metrics(self._run, records)
