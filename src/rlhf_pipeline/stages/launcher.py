"""Starting a stage's program, watching it, and ending it with everything that it started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, Interrupted, StageError
from rlhf_pipeline.stages import events
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.job import Program
from rlhf_pipeline.stages.manifest import NAME
from rlhf_pipeline.stages.program import DRIVER, ERRORS, driver_id

LOG = "program.log"
POLL_S = 0.2
GRACE_S = 8.0
"""Seconds between the request to end, after which training finishes its step and saves, and the kill."""


def launch(program: Program, job_file: Path, run: StageRun, config: LaunchConfig, processes: int) -> None:
    """Run a program to its end, passing its metrics on as they appear.

    Success is exit code 0 *and* a manifest: DeepSpeed's runner exits with 0 when a child dies by a signal.

    Raises:
        StageError: the program failed; `Interrupted`: INT, TERM or HUP reached this process.
    """
    command = _command(program, job_file, config, processes)
    log = run.directory / LOG
    start = time.monotonic()
    with _signals_raise(), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(run.directory, processes),
        )
        tail = _MetricsTail(run)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                tail.forward()
        finally:
            _end_group(process)
            tail.forward()
    if process.returncode != 0 or not (run.export / NAME).is_file():
        raise StageError(_failure(run, command, log, process.returncode, time.monotonic() - start))


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
    settings[DRIVER] = str(driver_id(os.getpid()))
    if gpu_count() == 0:
        cores = len(os.sched_getaffinity(0))
        settings |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // processes))}
    return os.environ | settings


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn INT, TERM and HUP into `Interrupted`, an ordinary exception, so that everyone above can tidy up."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(
            f"ended by {signal.Signals(number).name}; run the same command again: finished stages are kept"
        )

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program's whole process group: ask, wait, kill. Ranks outlive their launcher otherwise."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader, so that an empty group is seen as gone
                os.killpg(process.pid, 0)
                time.sleep(POLL_S / 4)
        except ProcessLookupError:
            break
    process.wait()


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


def _failure(run: StageRun, command: list[str], log: Path, code: int, seconds: float) -> str:
    """What a user needs after a failure: the failing rank's own reason, the command, the log."""
    reports = sorted((run.directory / ERRORS).glob("*.txt"))  # by time: the first failure caused the others
    reason = reports[0].read_text().strip() if reports else _last_lines(log)
    rank = reports[0].stem.rpartition("-")[2] if reports else "no rank left a reason; the log ends with"
    return (
        f"stage {run.stage} failed after {seconds:.0f} s with {_exit(code)}\n{rank}: {reason}\n"
        f"  command  {' '.join(command)}\n  log      {log}"
    )


def _exit(code: int) -> str:
    if code == 0:
        return "exit code 0 but no manifest: a rank was ended by a signal, most often by the kernel for lack of memory"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_lines(log: Path, count: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
