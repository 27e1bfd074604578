"""Start a stage's program, follow it, and end it together with every process that it started."""

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import Interrupted
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.heartbeat import Heartbeat
from rlhf_pipeline.runtime.manifest import NAME
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.job import RunContext, StageListener, StageRun, StageSpec
from rlhf_pipeline.stages.launch.failure import Attempt, causes, logged_cause, stage_error
from rlhf_pipeline.stages.launch.node_program import ClusterProgram, program_of
from rlhf_pipeline.stages.launch.ranks import Ranks

logger = logging.getLogger(__name__)

RESUME = "Run the same command again to resume; finished stages are kept"
POLL_S = 0.2
WARN_S = 1.0  # after SIGTERM, a warning says why the ranks have not ended
SETTLE_S = 1.5  # the other ranks have this time to report after one has failed


def launch(spec: StageSpec, run: StageRun, context: RunContext) -> None:
    """Run a stage's program to its end, passing its metrics to the listener as they appear.

    Success is exit code 0 *and* a manifest. When every rank has finished, this function ends
    DeepSpeed's launcher, which takes one or two more seconds to notice. Raises StageError if the
    program failed or hung, and Interrupted if INT, TERM or HUP reached this process.
    """
    for folder in (heartbeat.FOLDER, ERRORS):  # left by an earlier attempt
        shutil.rmtree(run.directory / folder, ignore_errors=True)
    config, start = context.launch, time.monotonic()
    program = program_of(spec, str(run.directory), config)
    hang_timeout_s = config.hang_timeout_s if spec.distributed else None
    pulse = program.pulse if isinstance(program, ClusterProgram) else None
    ranks = Ranks(run.directory, program.ranks, hang_timeout_s, pulse)
    tail = _MetricsTail(run, context.listener)
    with _signals_raise(), ExitStack() as at_end:
        at_end.callback(tail.forward)  # after the end of all processes
        process = at_end.enter_context(program.running())
        try:
            stuck = _follow(process, ranks, tail, config)
            code = 0 if ranks.finished else process.poll()
            # On several machines, it ends as soon as one of them has failed.
            orphaned = code is not None and bool(ranks.alive) and ranks.pulse is None
        except BaseException:  # a signal to this process, or an error of a listener
            _wait_for_checkpoint(ranks, run.stage, config.grace_s)
            raise
    if code != 0 or not (run.export / NAME).is_file():
        seconds = time.monotonic() - start
        attempt = Attempt(run, config, program.command, ranks, code, orphaned, stuck, seconds)
        raise stage_error(attempt)


def _follow(
    process: subprocess.Popen[bytes], ranks: Ranks, tail: "_MetricsTail", config: LaunchConfig
) -> str | None:
    """Wait until a program ends, a rank fails or a node is lost; report a rank that hangs.

    Raises Interrupted if ranks obeyed a signal of a scheduler.
    """
    stuck = None
    while stuck is None and not _is_over(process, ranks, tail.run):
        time.sleep(POLL_S)
        tail.forward()
        ranks.update()
        for each in ranks.heartbeats.values():
            if each.phase == "interrupted":
                raise Interrupted(
                    f"ended by SIGTERM to the ranks, after step {each.step}. {RESUME}"
                )
        if 0 in ranks.heartbeats:
            tail.listener.stage_phase(tail.run, ranks.heartbeats[0])
        if ranks.stuck:
            stuck = f"no rank has made progress for {config.hang_timeout_s:g} s: {ranks.describe()}"
            for rank in ranks.alive:  # they print the stacks of their threads into the log
                ranks.send(rank, signal.SIGUSR1)
            time.sleep(1)
    ranks.update()
    return stuck


def _is_over(process: subprocess.Popen[bytes], ranks: Ranks, run: StageRun) -> bool:
    """Whether all ranks are finished, or have had the time to report why they are not.

    Ranks that lost a peer report it at once. On several machines, a lost one is noticed later, and
    a shared file system shows reports later.
    """
    if ranks.finished or ranks.lost is not None:
        return True
    code = process.poll()
    if ranks.pulse is None:
        return code is not None or ranks.failed_s >= SETTLE_S
    explained = ranks.deaths or causes(run.directory) or logged_cause(run.directory)
    if explained or code is not None:
        ranks.fail()
    return ranks.failed_s >= SETTLE_S + (0.0 if explained else ranks.pulse.timeout_s)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn INT, TERM and HUP, unless `nohup` ignores it, into the exception `Interrupted`."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(f"ended by {signal.Signals(number).name}. {RESUME}")

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


def _wait_for_checkpoint(ranks: Ranks, stage: str, grace_s: float) -> None:
    """Send SIGTERM to every rank and wait until all have ended, at most `grace_s` seconds.

    Training finishes its step and writes a checkpoint. The time starts anew whenever a rank makes
    progress in writing it. A rank that has not reported yet has nothing to save. Raises Interrupted
    at a further signal to this process, for example a second Ctrl-C.
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
            warned = True
            logger.warning(
                "stage %s: the ranks finish their step and write a checkpoint, for at most %g s "
                "(launch.grace_s); a second Ctrl-C kills them",
                stage,
                grace_s,
            )
        time.sleep(POLL_S / 4)


class _MetricsTail:
    """Reads the metrics file as it grows and passes complete lines on."""

    def __init__(self, run: StageRun, listener: StageListener) -> None:
        self.run = run
        self.listener = listener
        self._read = (0, 0)  # the file's number, and its bytes that were read
        if run.metrics_file.is_file():  # of an earlier attempt: a program that resumes replaces it
            status = run.metrics_file.stat()
            self._read = status.st_ino, status.st_size

    def forward(self) -> None:
        if not self.run.metrics_file.is_file():
            return
        with self.run.metrics_file.open("rb") as file:
            inode, position = self._read
            if os.fstat(file.fileno()).st_ino != inode:
                inode, position = os.fstat(file.fileno()).st_ino, 0
            file.seek(position)
            lines = [line for line in file if line.endswith(b"\n")]
        self._read = inode, position + sum(map(len, lines))
        if lines:
            self.listener.stage_metrics(self.run, [json.loads(line) for line in lines])
