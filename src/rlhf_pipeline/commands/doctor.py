"""`kedro rlhf doctor`: can this machine run the configuration?"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
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

from rlhf_pipeline.commands.command import Command, json_option, pipeline_option, plain_table
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError, as_typed, without_secrets
from rlhf_pipeline.run.checks import before_run
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import gpu_count, node_layout

START_S = 60.0
"""Seconds in which a rank must start on every machine: DeepSpeed's launchers import torch."""
PROBE = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
for i in range(len(names)):
    torch.ones(8, device=i).sum().item()  # fails if torch has no code for this GPU
print(json.dumps([torch.__version__, torch.version.cuda, names]))
"""
"""This program runs in a process of its own, because the driver never imports torch."""
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
@json_option
def doctor(catalog: CatalogProtocol, console: Console, pipeline: str, as_json: bool) -> None:
    """Check whether this machine can run a pipeline.

    Each finding comes with its fix. The exit code is 1 if a check fails, and 0 if all checks pass
    or only warn.
    """
    root = Path(catalog.load("workspace")).absolute().parent
    launch = catalog.load("params:launch")
    checks: dict[str, Callable[[], Finding]] = {
        "gpu": partial(gpu, launch),
        "disk": partial(disk, root),
        "nodes": partial(nodes, launch, root),
        "run": partial(run, pipelines[pipeline], catalog),
    }
    findings = {name: examine(check) for name, check in checks.items()}
    if as_json:
        rows = [{"check": name} | asdict(finding) for name, finding in findings.items()]
        print(json.dumps(rows, indent=2))
    else:
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


def gpu(launch: LaunchConfig) -> Finding:
    """Torch can compute on every GPU that the ranks would use."""
    if (count := gpu_count()) == 0:
        return Finding("ok", f"none; {node_layout(launch, 0).ranks[0]} ranks train on the CPU")
    done = _run([sys.executable, "-P", "-c", PROBE])
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = "install the torch that fits the driver and the GPU"
        return Finding("failure", f"torch fails: {error}", fix)
    version, built_for, names = json.loads(done.stdout.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (_run(query).stdout.split() or ["unknown"])[0]
    if len(names) < count:
        found = f"torch {version} for CUDA {built_for} sees {len(names)} of {count} GPUs"
        fix = "update the driver, or install torch for the driver's CUDA; DS_ACCELERATOR=cpu trains"
        return Finding("failure", f"{found} with driver {driver}", f"{fix} on the CPU")
    kinds = ", ".join(dict.fromkeys(names))
    found = f"{count} x {kinds}; torch {version}, CUDA {built_for}, driver {driver}"
    return Finding("ok", found)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Importing torch takes some seconds.
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


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
