"""The message of a failed stage: the first cause, what to do, and where to look."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.redaction import without_secrets
from rlhf_pipeline.runtime.checkpoint_files import checkpoint_step, list_checkpoints
from rlhf_pipeline.runtime.disk_space import DISK_FULL, is_full, space_left
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.events import StageRun
from rlhf_pipeline.stages.launch.hints import FOLLOW_UP, advice, find_hint
from rlhf_pipeline.stages.launch.ranks import Death, Ranks

LOG = "program.log"

AS_A_CONSEQUENCE = {signal.SIGTERM, signal.SIGABRT}
"""Signals that end a rank because another rank failed: SIGTERM from the launcher, SIGABRT from a library that lost its
peer."""

EXPLAINED_IN_LOG = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""Ends that a library explains on standard error, or Python by a stack."""

POLLING_S = 1.0
"""The driver sees the death of a rank at most this many seconds after its peers first report it."""


@dataclass(frozen=True)
class Attempt:
    """A launch that ended without a result."""

    run: StageRun
    config: LaunchConfig
    command: list[str]
    ranks: Ranks
    processes: int
    code: int | None
    """The launcher's exit code, or the negative number of the signal that ended it. None: the driver ended it after a rank
    had failed."""
    orphaned: bool
    """The launcher ended while ranks were still running."""
    seconds: float
    stuck: str | None
    """The watchdog's report of the rank that hangs."""
    kernel_kills: int | None
    """Processes that the kernel ended for lack of memory during the launch, ours or not. None: unknown."""


def stage_error(attempt: Attempt) -> StageError:
    """The failure as an exception; its `cause` names the known failure."""
    run, log = attempt.run, attempt.run.directory / LOG
    ended, reason, status = _cause(attempt)
    hint = find_hint(reason, status, attempt.kernel_kills)
    lines = [f"stage {run.stage} failed after {attempt.seconds:.0f} s ({ended})", reason]
    if hint is not None:
        launch = attempt.config.model_dump(mode="json") | {"processes": attempt.processes}
        remedies = advice(hint, {**run.config, "launch": launch})
        lines += [f"  cause    {hint.cause}"]
        lines += [f"  space    {space_left(run.directory)}"] if hint.name == DISK_FULL else []
        lines += [f"  fix      {remedies}"] if remedies else []
    lines += [
        f"  command  {shlex.join(attempt.command)}",
        f"  log      {log}",
        f"  again    {_again(run)}",
    ]
    return StageError("\n".join(lines), cause=None if hint is None else hint.name)


def kernel_kills() -> int | None:
    """Processes that the kernel has ended for lack of memory since boot, in any container; None if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def _cause(attempt: Attempt) -> tuple[str, str, int | None]:
    """How the stage ended, the first cause, and the exit status of a rank that left no reason.

    A rank that is killed cannot report it, but its peers report that they lost it. So such reports count last, and an
    unexplained death counts before any report that came later.
    """
    if attempt.stuck is not None:
        return "ended by the watchdog", attempt.stuck, None
    log = attempt.run.directory / LOG
    reports = sorted((attempt.run.directory / ERRORS).glob("*.txt"))  # by time
    causes = [report for report in reports if not FOLLOW_UP.search(report.read_text())]
    deaths = sorted(attempt.ranks.deaths.values(), key=lambda death: death.seen)
    first = next((death for death in deaths if not causes or _precedes(death, causes[0])), None)
    if first is not None:
        ended_by = (
            attempt.code if attempt.code is not None and attempt.code < 0 else _logged_status(log)
        )
        status = ended_by if first.status is None else first.status
        reason = f"rank {first.heartbeat.rank} {_death(status)} in {first.heartbeat}"
        return (
            _exit(attempt.code),
            reason + (_tail(log) if status in EXPLAINED_IN_LOG else ""),
            status,
        )
    if causes:
        return _exit(attempt.code), _said(causes[0]), None
    status = attempt.code if attempt.code is not None and attempt.code < 0 else _logged_status(log)
    if attempt.orphaned:
        return _exit(attempt.code), "the launcher was ended while its ranks were running", status
    if status is not None and status < 0:
        return _exit(attempt.code), f"a rank {_death(status)}, the launcher reports", status
    if reports:  # they only say that a peer was lost
        return _exit(attempt.code), f"{_said(reports[0])}{_tail(log)}", None
    full = ": No space left on device" if is_full(log.parent) else ""
    return _exit(attempt.code), f"no rank left a reason{full}{_tail(log)}", None


def _precedes(death: Death, report: Path) -> bool:
    if death.status is not None and -death.status in AS_A_CONSEQUENCE:
        return False
    return death.status != 0 and death.seen < int(report.stem.partition("-")[0]) / 1e9 + POLLING_S


def _said(report: Path) -> str:
    return f"{report.stem.rpartition('-')[2]}: {report.read_text().strip()}"


def _tail(log: Path) -> str:
    return "; the log ends with\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _logged_status(log: Path) -> int | None:
    """The exit code that DeepSpeed's launcher logged for the failed rank that it saw first."""
    found = re.search(r"exits with return code = (-?\d+)", log.read_text(errors="replace"))
    return None if found is None else int(found[1])


def _death(status: int | None) -> str:
    if status is None:
        return "ended by an unknown signal"
    return (
        f"was ended by {_signal(-status)}"
        if status < 0
        else f"ended by itself with exit code {status}"
    )


def _exit(code: int | None) -> str:
    if code is None:
        return "a rank failed, the others were ended"
    if code == 0:
        return "exit code 0 but no manifest"
    if code < 0:
        return f"{_signal(-code)} to the launcher"
    return f"exit code {code}" + (
        f", DeepSpeed's for {_signal(256 - code)}" if code > 256 - 32 else ""
    )


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _again(run: StageRun) -> str:
    """The command that resumes the run, and the step it resumes from."""
    called = Path(sys.argv[0]).name
    command = (
        without_secrets(shlex.join([called, *sys.argv[1:]]))
        if called == "kedro"
        else "the same command"
    )
    checkpoints = list_checkpoints(run.directory / "checkpoints")
    if not checkpoints:
        return f"{command}  (this stage starts from its first step)"
    return f"{command}  (this stage resumes after step {checkpoint_step(checkpoints[-1])})"
