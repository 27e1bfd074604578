"""Start a stage's program, follow it, and end it together with every process that it started."""

import base64
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import Interrupted, StageError
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import NAME
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.context import RunContext
from rlhf_pipeline.stages.events import StageListener, StageRun
from rlhf_pipeline.stages.job import StageSpec
from rlhf_pipeline.stages.launch.failure import LOG, Attempt, kernel_kills, stage_error
from rlhf_pipeline.stages.launch.hints import PORT
from rlhf_pipeline.stages.launch.ranks import Ranks
from rlhf_pipeline.stages.launch.resources import free_port, gpu_count, process_count, rank_devices
from rlhf_pipeline.stages.processes import guarded, process_identity, start

logger = logging.getLogger(__name__)

NODE_LAUNCHER = "rlhf_pipeline.distributed.node_launcher"
"""Module that starts the ranks of one machine."""
POLL_S = 0.2
KILLED_S = 5.0
"""Seconds that killed processes have to disappear."""
WARN_S = 1.0
"""Seconds after SIGTERM until a warning says why the ranks have not ended."""
SETTLE_S = 1.5
"""Seconds that the other ranks have to report after a rank has failed."""
STACKS_S = 1.0
"""Seconds that the ranks of a stuck stage have to print their stacks."""


def launch(spec: StageSpec, run: StageRun, context: RunContext) -> None:
    """Run a stage's program to its end, passing its metrics to the listener as they appear.

    Success is exit code 0 *and* a manifest. If another program takes the picked port first, the
    stage is launched once more on another port.

    Raises:
        StageError: the program failed or hung.
        Interrupted: INT, TERM or HUP reached this process.
    """
    try:
        _launch_once(spec, run, context)
    except StageError as error:
        if error.cause != PORT or context.launch.master_port is not None:
            raise
        logger.warning(
            "stage %s: another program took the picked port; launching on another port", run.stage
        )
        _launch_once(spec, run, context)


def _launch_once(spec: StageSpec, run: StageRun, context: RunContext) -> None:
    for folder in (heartbeat.FOLDER, ERRORS):  # left by an earlier attempt
        shutil.rmtree(run.directory / folder, ignore_errors=True)
    config = context.launch
    processes = process_count(config, gpu_count()) if spec.distributed else 1
    command = _command(spec, run.directory / "job.json", config, processes)
    environment = _environment(spec, run.directory, processes)
    ranks = Ranks(run.directory, processes, config.hang_timeout_s if spec.distributed else None)
    start, kills_before = time.monotonic(), kernel_kills()
    attempt = _supervise(Attempt(run, config, command, ranks), environment, context.listener)
    if attempt.code != 0 or not (run.export / NAME).is_file():
        kills = None if kills_before is None else (kernel_kills() or 0) - kills_before
        seconds = time.monotonic() - start
        raise stage_error(replace(attempt, seconds=seconds, kernel_kills=kills))


def _supervise(attempt: Attempt, environment: dict[str, str], listener: StageListener) -> Attempt:
    """Start a program, follow it, end all its processes; return how it ended.

    If every rank has finished, this function does not wait for DeepSpeed's launcher, which takes
    one or two more seconds to notice.
    """
    run, ranks = attempt.run, attempt.ranks
    with (
        _signals_raise(),
        (run.directory / LOG).open("wb") as output,
        guarded(environment[heartbeat.LAUNCH], environment["PYTHONPATH"]),
    ):
        process = start(
            attempt.command,
            environment,
            stdin=subprocess.DEVNULL,  # nobody can answer a library that asks a question
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        tail = _MetricsTail(run, listener)
        try:
            stuck = _follow(process, ranks, tail, attempt.config)
            code = 0 if ranks.finished else process.poll()
            orphaned = code is not None and bool(ranks.alive)
        except BaseException:  # a signal to this process, or an error of a listener
            _let_save(ranks, run.stage, attempt.config.grace_s)
            raise
        finally:
            _kill_group(process)
            tail.forward()
    return replace(attempt, code=code, stuck=stuck, orphaned=orphaned)


def _follow(
    process: subprocess.Popen[bytes], ranks: Ranks, tail: "_MetricsTail", config: LaunchConfig
) -> str | None:
    """Wait until a program ends, a rank fails, or no rank makes progress.

    Returns:
        The report of the rank that hangs, or None.
    """
    stuck = None
    while process.poll() is None and ranks.failed_s < SETTLE_S and not ranks.finished:
        time.sleep(POLL_S)
        tail.forward()
        ranks.update()
        if 0 in ranks.heartbeats:
            tail.listener.stage_phase(tail.run, ranks.heartbeats[0])
        if ranks.stuck:
            stuck = f"no rank has made progress for {config.hang_timeout_s:g} s: {ranks.describe()}"
            ranks.request_stacks()
            time.sleep(STACKS_S)
            break
    ranks.update()
    return stuck


def _command(spec: StageSpec, job_file: Path, config: LaunchConfig, processes: int) -> list[str]:
    if not spec.distributed:
        return [sys.executable, "-m", spec.program, str(job_file)]
    # The command `deepspeed` discards CUDA_VISIBLE_DEVICES and accepts numbers only. The launcher
    # that it starts on each machine takes any names of GPUs, one for each rank.
    world = {"localhost": rank_devices(processes)}
    options = {
        "world_info": base64.urlsafe_b64encode(json.dumps(world).encode()).decode(),
        "master_port": free_port(config.master_port),
    }
    return [
        *(sys.executable, "-m", NODE_LAUNCHER),
        *(f"--{name}={value}" for name, value in options.items()),
        *("--no_local_rank", "--module", spec.program, str(job_file)),
    ]


def _environment(spec: StageSpec, directory: Path, processes: int) -> dict[str, str]:
    """The program's environment: it has this package; the ranks share the cores."""
    source = Path(rlhf_pipeline.__file__).parent.parent
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # Otherwise transformers asks a bot on the hub for a conversion and loads the result.
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        heartbeat.LAUNCH: f"{process_identity(os.getpid())} {directory.resolve()}",
    }
    gpus = gpu_count()
    if spec.distributed:
        settings["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"
        settings["TOKENIZERS_PARALLELISM"] = "false"  # each rank would use all cores
    if gpus == 0:
        settings["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    return os.environ | settings


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn INT, TERM and HUP into the exception `Interrupted`, so that every caller can clean up.

    `nohup` ignores HUP; this function keeps it ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(
            f"ended by {signal.Signals(number).name}. Run the same command again to resume; "
            "finished stages are kept"
        )

    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    previous = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, *hang_up)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _let_save(ranks: Ranks, stage: str, grace_s: float) -> None:
    """Send SIGTERM to every rank and wait until all have ended, at most `grace_s` seconds.

    Training finishes its step and writes a checkpoint. The time starts anew whenever a rank makes
    progress in writing it. A rank that has not reported yet has nothing to save.

    Raises:
        Interrupted: a further signal to this process, for example a second Ctrl-C.
    """
    asked: set[int] = set()
    saving: list[Heartbeat] = []
    start = renewed = time.monotonic()
    warned = False
    while alive := ranks.read():
        for rank in set(alive) - asked:
            ranks.send(rank, signal.SIGTERM)
            asked.add(rank)
        before, saving = saving, [h for h in ranks.heartbeats.values() if h.phase == "saving"]
        now = time.monotonic()
        renewed = now if saving != before else renewed
        if now > renewed + grace_s:
            return
        if now > start + WARN_S and not warned:
            logger.warning(
                "stage %s: the ranks finish their step and write a checkpoint, for at most %g s "
                "(launch.grace_s); a second Ctrl-C kills them",
                stage,
                grace_s,
            )
            warned = True
        time.sleep(POLL_S / 4)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's process group, and wait a little until it is gone.

    Ranks would outlive their launcher otherwise. After a failure they cannot finish their step.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader, otherwise the empty group would still exist
            os.killpg(process.pid, 0)
            time.sleep(POLL_S / 4)
    process.wait()


class _MetricsTail:
    """Reads the metrics file as it grows and passes complete lines on."""

    def __init__(self, run: StageRun, listener: StageListener) -> None:
        self.run = run
        self.listener = listener
        self._position = 0
        self._inode = 0

    def forward(self) -> None:
        if not self.run.metrics_file.is_file():
            return
        with self.run.metrics_file.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # a program that resumes replaces the file
                self._inode, self._position = inode, 0
            file.seek(self._position)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._position += len(complete)
        records: list[dict[str, Any]] = [json.loads(line) for line in complete.splitlines()]
        if records:
            self.listener.stage_metrics(self.run, records)
