"""The message of a failed stage: the first cause, what to do, and where to look.

`hints.toml` lists the known failures, also for the table in docs/troubleshooting.md.
"""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import StageError, without_secrets
from rlhf_pipeline.runtime.files import mebibytes
from rlhf_pipeline.runtime.job import newest_step
from rlhf_pipeline.runtime.program import ERRORS
from rlhf_pipeline.stages.job import StageRun
from rlhf_pipeline.stages.launch.node_program import LOG
from rlhf_pipeline.stages.launch.ranks import Ranks
from rlhf_pipeline.stages.launch.start_rank import FAULT

AS_A_CONSEQUENCE = {-signal.SIGTERM, -signal.SIGABRT}
"""Exit statuses of a rank that ends because another rank failed: by the launcher's SIGTERM, or by
the SIGABRT of a library that lost its peer."""
EXPLAINED_IN_LOG = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""Exit statuses that a library explains on standard error, or Python by a stack."""
FOLLOW_UP = re.compile(
    r"Connection (closed|reset) by peer|ncclRemoteError|remote process exited"
    r"|NCCL communicator was aborted|Broken pipe"
)
"""What a rank reports when it lost a peer: never the first cause."""
DISK_FULL = "disk full"
_LIMITS = {"micro_batch_tokens": 1, "batch_size_per_gpu": 1, "processes": 1, "zero_stage": 3}
"""The value of a field that cannot be lowered or raised further."""


@dataclass(frozen=True)
class Hint:
    """One known failure, recognised either by patterns or by a signal."""

    name: str
    cause: str
    advice: str = ""  # what to do besides changing parameters, in complete sentences
    remedies: Sequence[str] = ()
    """Imperative sentences about one parameter each. The last part of its name is in braces."""
    patterns: Sequence[str] = ()  # regular expressions for the failing rank's reason
    signal: str = ""  # the name of the one that ended a rank


HINTS = [
    Hint(**fields)
    for fields in tomllib.loads(Path(__file__).with_name("hints.toml").read_text("utf-8"))["hint"]
]
"""The first that applies is shown."""


def find_hint(reason: str, status: int | None = None) -> Hint | None:
    """The known failure behind the reason that a rank left, or else its exit status."""
    for hint in HINTS:
        if hint.patterns and re.search("|".join(hint.patterns), reason):
            return hint
        if hint.signal and status == -signal.Signals[hint.signal]:
            return hint
    return None


def advice(hint: Hint, parameters: Mapping[str, Any]) -> str:
    """What to do, with the names and values of the parameters that can still change.

    `parameters` are the stage's blocks and `launch`, by name, as JSON types.
    """
    sentences = []
    for remedy in hint.remedies:
        field = remedy[remedy.index("{") + 1 : remedy.index("}")]
        for name, value in leaves(parameters):
            shown = json.dumps(value)
            is_exhausted = value in (None, _LIMITS.get(field)) or remedy.endswith(f" to {shown}.")
            if name.rpartition(".")[2] == field and not is_exhausted:
                sentences.append(remedy.format_map({field: f"{name} ({shown})"}))
    return " ".join([*sentences, *filter(None, [hint.advice])])


@dataclass(frozen=True)
class Attempt:
    """A launch, and how it ended without a result."""

    run: StageRun
    config: LaunchConfig
    command: list[str]
    ranks: Ranks
    code: int | None = None
    """The launcher's exit code, or the negative number of the signal that ended it. None: the
    driver ended it after a rank had failed."""
    orphaned: bool = False  # the launcher ended while ranks were still running
    stuck: str | None = None  # the watchdog's report of the rank that hangs
    seconds: float = 0.0


def stage_error(attempt: Attempt) -> StageError:
    """The failure as an exception."""
    run = attempt.run
    if not run.directory.is_dir():
        return StageError(
            f"stage {run.stage}: {run.directory} was removed while the stage was running. Fix: "
            "repeat the command; the stage starts from its first step"
        )
    reason, status = _cause(attempt)
    hint = find_hint(reason, status)
    lines = [f"stage {run.stage} failed after {attempt.seconds:.0f} s ({_end(attempt)})"]
    if hint is not None:
        launch = attempt.config.model_dump(mode="json") | {"processes": attempt.ranks.processes}
        fix = advice(hint, {**run.config, "launch": launch})
        lines += [f"  cause    {hint.cause}"]
        lines += [f"  space    {space_left(run.directory)}"] if hint.name == DISK_FULL else []
        lines += [f"  fix      {fix}"] if fix else []
    # A report of more than ten lines would push the cause out of sight.
    lines.insert(len(lines) if reason.count("\n") > 10 else 1, reason)
    lines += [
        f"  command  {shlex.join(attempt.command)}",
        f"  log      {run.directory / LOG}",
        f"  again    {_again(run)}",
    ]
    return StageError("\n".join(lines))


@contextmanager
def explain_full_disk(what: str, path: Path) -> Iterator[None]:
    """Turn the system's error for a full disk into a `StageError` that names the file system."""
    try:
        yield
    except OSError as error:
        # shutil reports a tree as a list of failures; the first one is enough.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else str(error)
        hint = find_hint(reason)
        if hint is None or hint.name != DISK_FULL:
            raise
        raise StageError(
            f"{what}: {reason}\n  space    {space_left(path)}\n  fix      {hint.advice}\n"
            "  again    the same command, once there is space; finished stages are kept"
        ) from error


def space_left(path: Path) -> str:
    """Free and total space of the file system that contains a path, or will contain it."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    free, total = mebibytes(usage.free), mebibytes(usage.total)
    return f"{free} of {total} MiB are free on the file system of {path}"


def is_full(directory: Path) -> bool:
    """Whether a file of 64 KiB does not fit, because the disk or a quota is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def _cause(attempt: Attempt) -> tuple[str, int | None]:
    """The first cause, and the exit status of a rank that left no reason.

    A rank that is killed cannot report it, but its peers report that they lost it. Such reports
    count last, and an unexplained death counts before any report that came later.
    """
    if (known := attempt.ranks.lost or attempt.stuck) is not None:
        return known, None
    directory = attempt.run.directory
    reports, first_causes = _reports(directory), causes(directory)
    deaths = sorted(attempt.ranks.deaths.values(), key=lambda death: death.seen)
    if first_causes:
        # The driver sees a death at most a second after the peers of the rank first report it.
        latest = int(first_causes[0].stem.partition("-")[0]) / 1e9 + 1
        deaths = [death for death in deaths if death.seen < latest]
        deaths = [death for death in deaths if death.status not in {0, *AS_A_CONSEQUENCE}]
    status = attempt.code
    if status is None or status >= 0:
        logged = re.search(r"exits with return code = (-?\d+)", _end_of_log(directory))
        status = None if logged is None else int(logged[1])
    if deaths:
        death = deaths[0]
        if death.status is not None:
            status = death.status
        elif reports and status is not None and status > 0:
            status = None  # the exit code may be that of a rank with a report
        reason = f"rank {death.heartbeat.rank} {_death(status)} in {death.heartbeat}"
        if status in EXPLAINED_IN_LOG:
            return reason + log_tail(directory), status
        exited = status is None or status > 0
        return reason + (_full_disk(directory) if exited else ""), status
    if first_causes:
        return _content(first_causes[0]), None
    if attempt.ranks.pulse is not None and (found := logged_cause(directory)) is not None:
        return found, status
    if attempt.orphaned:
        return "the launcher was ended while its ranks were running", status
    if status is not None and status < 0:
        return f"a rank {_death(status)}, according to the launcher", status
    if reports:  # reports of a lost peer only
        return f"{_content(reports[0])}{log_tail(directory)}", None
    return f"no rank left a reason{_full_disk(directory)}{log_tail(directory)}", None


def causes(directory: Path) -> list[Path]:
    """The reports of ranks in a work directory by time, without those of a lost peer."""
    return [report for report in _reports(directory) if not FOLLOW_UP.search(report.read_text())]


def _reports(directory: Path) -> list[Path]:
    return sorted((directory / ERRORS).glob("*.txt"))


def _full_disk(directory: Path) -> str:
    return ": No space left on device" if is_full(directory) else ""


def _content(report: Path) -> str:
    return f"{report.stem.rpartition('-')[2]}: {report.read_text().strip()}"


def log_tail(directory: Path) -> str:
    """The last lines of the log of a work directory, as the end of a sentence."""
    return "\n".join(["; the log ends with", *_end_of_log(directory).splitlines()[-20:]])


def logged_cause(directory: Path) -> str | None:
    """What the launchers of several machines logged of a rank or a machine that failed."""
    text = _end_of_log(directory)
    if (fault := re.search(f"{FAULT}(.*)", text)) is not None:
        return fault[1]
    killed = re.search(r"^(?:([^\s:]+): )?.*exits with return code = (-\d+)", text, re.M)
    if killed is not None:
        return f"a rank {f'on {killed[1]} ' if killed[1] else ''}{_death(int(killed[2]))}"
    ended = re.findall(r"^pdsh@\S+: (\S+): ssh exited with exit code (\d+)", text, re.M)
    tail = "" if _reports(directory) else log_tail(directory)
    for host, code in ended:
        if code == "255":  # that of ssh itself; any other is that of the command
            return f"node {host} is lost: its ssh connection failed or was cut{tail}"
    if ended and tail:  # otherwise the reports tell more
        return f"node {ended[0][0]}: DeepSpeed's launcher ended with exit code {ended[0][1]}{tail}"
    return None


def _end_of_log(directory: Path) -> str:
    with (directory / LOG).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        return file.read().decode(errors="replace")


def _death(status: int | None) -> str:
    if status is None:
        return "ended without a report"
    return f"was ended by {_signal(-status)}" if status < 0 else f"ended with exit code {status}"


def _end(attempt: Attempt) -> str:
    code = attempt.code
    if attempt.ranks.lost is not None:
        return "a node is lost; the ranks on the others were stopped"
    if attempt.stuck is not None:
        return "ended by the watchdog"
    if code is None:
        return "a rank failed; the others were stopped"
    if code < 0:
        return f"{_signal(-code)} to the launcher"
    return f"exit code {code}" if code else "exit code 0 but no manifest"


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _again(run: StageRun) -> str:
    command = without_secrets(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    if command.partition(" ")[0] != "kedro":
        command = "the same command"
    step = newest_step(run.directory / "checkpoints")
    resume = "starts from its first step" if step is None else f"resumes after step {step}"
    return f"{command}  (this stage {resume})"
