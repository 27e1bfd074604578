"""`kedro rlhf doctor`: can this machine run the configuration?"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import click
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, pipeline_option, plain_table
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError, as_typed, without_secrets
from rlhf_pipeline.kedro_run.checks import before_run
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import gpu_count, node_layout

START_S = 60.0
"""Seconds in which a rank must start on every machine: DeepSpeed's launchers import torch."""
State = Literal["ok", "warning", "failure"]
STYLES: Mapping[State, str] = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What a check finds, and the fix if that is no good."""

    state: State
    found: str
    fix: str = ""


@click.command(cls=Command)
@pipeline_option
def doctor(catalog: CatalogProtocol, console: Console, pipeline: str) -> None:
    """Check whether this machine can run a pipeline.

    Each finding comes with its fix. The exit code is 1 if a check fails, and 0 if all checks pass
    or only warn.
    """
    root = Path(catalog.load("workspace")).absolute().parent
    launch = catalog.load("params:launch")
    checks: dict[str, Callable[[], Finding]] = {
        "disk": partial(disk, root),
        "nodes": partial(nodes, launch, root),
        "run": partial(run, pipelines[pipeline], catalog),
    }
    findings = {name: examine(check) for name, check in checks.items()}
    table = plain_table("check", "state")
    table.add_column("found", overflow="fold")
    for name, finding in findings.items():
        fix = f"\nFix: {finding.fix}" if finding.fix else ""
        state = f"[{STYLES[finding.state]}]{finding.state}"
        table.add_row(f"[bold]{name}", state, escape(finding.found + fix))
    console.print(table)
    if any(finding.state == "failure" for finding in findings.values()):
        raise click.exceptions.Exit(1)


def examine(check: Callable[[], Finding]) -> Finding:
    """What a check finds. An error of one check does not hide the findings of the others."""
    try:
        return check()
    except PipelineError as error:
        found, _, fix = error.message.partition("Fix: ")
    except Exception as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "repair what the message names"
    return Finding("failure", without_secrets(found.rstrip()), without_secrets(fix))


def disk(root: Path) -> Finding:
    """Space for results where they are written; stages check the exact need before they write.

    One checkpoint of a model of 0.6 billion parameters has 10 GiB.
    """
    folder = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{size_text(free)} free for {root}"
    if free >= 10 * GIB:
        return Finding("ok", found)
    fix = as_typed("`kedro rlhf clean`, or another folder with --params=root=FOLDER")
    return Finding("warning" if free >= GIB else "failure", found, fix)


def nodes(launch: LaunchConfig, root: Path) -> Finding:
    """Every rank starts: its machine has the driver's files, code and libraries."""
    if launch.mode == "local":
        return Finding("ok", "this machine trains alone")
    layout = node_layout(launch, gpu_count())
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nodes-", dir=root.resolve()) as folder:
        rank = NodeProgram("platform", folder)  # of Python: it needs neither torch nor a job
        program = on_several_machines(rank, launch, layout)
        code = None
        with program.running() as process, suppress(subprocess.TimeoutExpired):
            code = process.wait(START_S)
        if code == 0:
            return Finding("ok", f"{program.ranks} ranks start on {len(layout.ranks)} machines")
        tail = log_tail(Path(folder))
        cause = f"found ranks that do not start within {START_S:g} s{tail}"
        if code is not None:
            cause = logged_cause(Path(folder)) or f"found exit code {code}{tail}"
        fix = "correct what the output names; this machine must be the first one"
        return Finding("failure", cause, fix)


def run(pipeline: Pipeline, catalog: CatalogProtocol) -> Finding:
    """The pipeline can start: stores answer, data and functions are sound, each stage fits."""
    before_run(pipeline, catalog)
    return Finding("ok", "it passes the checks before its first stage")
