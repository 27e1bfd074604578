"""`kedro rlhf doctor`: can this machine run the configuration?

A check returns what it finds, or raises `Unfit` with the fix.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import click
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from rich.console import Console
from rich.markup import escape

from rlhf_pipeline.commands.command import Command, json_option, pipeline_option, plain_table
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import PipelineError, StageError, without_secrets
from rlhf_pipeline.pipelines.table import parameter_blocks
from rlhf_pipeline.preflight import check_pipeline
from rlhf_pipeline.runtime.job import as_json as plain_values
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import node_layout, search_path, visible_gpus

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the file system, not a file
START_S = 60.0
"""Seconds in which a rank must start on every machine: DeepSpeed's launchers import torch."""
PROBE = """
import json, torch
count = torch.cuda.device_count()
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(count)] if cuda else []
for i in range(len(names)):
    torch.ones(8, device=i).sum().item()  # fails if torch has no code for this GPU
nccl = torch.distributed.is_nccl_available() and cuda and torch.cuda.nccl.version()
print(json.dumps([torch.__version__, torch.version.cuda, names, nccl or None]))
"""
"""This program runs in a process of its own, because the driver never imports torch."""
SELF_CHECK = "rlhf_pipeline.models.self_check"
State = Literal["ok", "warning", "failure"]
STYLES: Mapping[State, str] = {"ok": "green", "warning": "yellow", "failure": "bold red"}


class Unfit(Exception):  # noqa: N818 - what a machine is, not an error
    """What is wrong with a machine, what to do, and "warning" if that is no failure."""


@dataclass(frozen=True)
class Setup:
    """A configuration and the machine that is to run it."""

    root: Path
    """Folder of all results."""
    launch: LaunchConfig
    parameters: Mapping[str, Any]
    """The blocks as plain values."""
    check_run: Callable[[], None]
    """The checks of `kedro run` before its first stage."""

    @cached_property
    def gpus(self) -> int:
        """GPUs that training programs may use. Raises ConfigError if they cannot be counted."""
        return len(visible_gpus())


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    found: str
    fix: str = ""
    state: State = "failure"


@click.command(cls=Command)
@pipeline_option
@json_option
def doctor(catalog: CatalogProtocol, console: Console, pipeline: str, as_json: bool) -> None:
    """Check whether this machine can run a pipeline.

    Each finding comes with its fix. The exit code is 1 if a check fails, and 0 if all checks pass
    or only warn.
    """
    blocks = {name: catalog.load(f"params:{name}") for name in parameter_blocks()}
    root = Path(catalog.load("workspace")).absolute().parent
    check_run = partial(check_pipeline, pipelines[pipeline], catalog)
    setup = Setup(root, blocks["launch"], plain_values(blocks), check_run)
    findings = [examine(name, check, setup) for name, check in CHECKS.items()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = plain_table("check", "state")
        table.add_column("found", overflow="fold")
        for finding in findings:
            fix = f"\nFix: {finding.fix}" if finding.fix else ""
            state = f"[{STYLES[finding.state]}]{finding.state}"
            table.add_row(f"[bold]{finding.check}", state, escape(finding.found + fix))
        console.print(table)
    if any(finding.state == "failure" for finding in findings):
        raise click.exceptions.Exit(1)


def examine(name: str, check: Callable[[Setup], str], setup: Setup) -> Finding:
    """What a check finds. An error of one check does not hide the findings of the others."""
    try:
        return Finding(name, check(setup), state="ok")
    except Unfit as unfit:
        return Finding(name, *unfit.args)
    except PipelineError as error:
        found, _, fix = error.message.partition("Fix: ")
    except Exception as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "repair what the message names"
    return Finding(name, without_secrets(found.rstrip()), without_secrets(fix))


def compiler(setup: Setup) -> str:
    """A C++ compiler, Python's headers and ninja, for DeepSpeed's CPU Adam and all kernels."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    missing = [] if command else ["a C++ compiler"]
    if command:
        source = "#include <vector>\n#include <Python.h>\nint main() { return 0; }\n"
        include = f"-I{sysconfig.get_path('include')}"
        compiling = [command, "-x", "c++", "-fsyntax-only", include, "-"]
        done = subprocess.run(compiling, input=source, capture_output=True, text=True, check=False)
        missing += [] if done.returncode == 0 else ["headers of Python or C++"]
    missing += [] if shutil.which("ninja", path=search_path()) else ["ninja"]
    if not missing:
        return f"{command}, ninja"
    found = f"missing: {', '.join(missing)}"
    if not (needed := [*_compiled(setup)]):
        return f"{found}; only kernels, and on a GPU offload_optimizer and vllm, need them"
    change = f"change {', '.join(needed)}"
    raise Unfit(found, f"apt-get install g++ python3-dev, pip install ninja; or {change}")


def _compiled(setup: Setup) -> Iterator[str]:
    """The parameters, with values, for which this machine compiles code at first use."""
    kinds: dict[str, list[Any]] = {"kernels": ["compile"]}
    if setup.gpus > 0:
        sampled = ["vllm", "auto"] if find_spec("vllm") is not None else ["vllm"]
        kinds = {"kernels": ["compile", "liger"], "offload_optimizer": [True], "generator": sampled}
    for name, value in leaves(setup.parameters):
        if value in kinds.get(name.rpartition(".")[2], []):
            yield f"{name} ({json.dumps(value)})"


def gpu(setup: Setup) -> str:
    """Torch can compute on every GPU that the ranks would use, and has NCCL for several."""
    if setup.gpus == 0:
        return f"none; {node_layout(setup.launch, 0).ranks[0]} ranks train on the CPU"
    done = _run([sys.executable, "-P", "-c", PROBE])
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unfit(f"torch fails: {error}", "install the torch that fits the driver and the GPU")
    version, built_for, names, nccl = json.loads(done.stdout.splitlines()[-1])
    if built_for is None:
        fix = "install torch with CUDA, or set DS_ACCELERATOR=cpu to train on the CPU"
        raise Unfit(f"{setup.gpus} GPUs, but torch {version} has no CUDA", fix)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (_run(query).stdout.split() or ["unknown"])[0]
    if len(names) < setup.gpus:
        found = f"torch {version} for CUDA {built_for} sees {len(names)} of {setup.gpus} GPUs"
        fix = "update the driver, or install torch for an older CUDA"
        raise Unfit(f"{found} with driver {driver}", fix)
    if setup.gpus > 1 and nccl is None:
        raise Unfit("torch has no NCCL", "install torch with CUDA for Linux")
    kinds = ", ".join(dict.fromkeys(names))
    return f"{setup.gpus} x {kinds}; torch {version}, CUDA {built_for}, driver {driver}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Importing torch takes some seconds.
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def kernels(setup: Setup) -> str:
    """Each kind of GPU computes what the CPU computes."""
    if setup.gpus == 0:
        return "no GPU whose results need a comparison"
    found = {v for name, v in leaves(setup.parameters) if name.endswith(".precision")} - {None}
    done = _run([sys.executable, "-P", "-m", SELF_CHECK, *sorted(found or {"fp32"})])
    passed = done.stdout.splitlines()
    if done.returncode != 0 or not passed:
        raise StageError((done.stderr.strip().splitlines() or ["torch sees no GPU"])[-1])
    return f"equal those of the CPU: {', '.join(passed)}"


def shared_memory(setup: Setup) -> str:
    """Ranks of one machine and data loaders exchange tensors in /dev/shm.

    Ranks on GPUs may fail with less than 1 GiB; containers have 64 MiB by default.
    """
    if not SHARED_MEMORY.is_dir():
        raise Unfit(f"{SHARED_MEMORY} does not exist", "mount a tmpfs at /dev/shm")
    space = shutil.disk_usage(SHARED_MEMORY)
    found = f"{size_text(space.free)} free of {size_text(space.total)}"
    if space.free >= (GIB if setup.gpus > 1 else GIB / 16):
        return found
    fix = "start the container with --shm-size=8g, or remove files that ended programs left there"
    raise Unfit(found, fix)


def disk(setup: Setup) -> str:
    """Space for results where they are written; stages check the exact need before they write.

    One checkpoint of a model of 0.6 billion parameters has 10 GiB.
    """
    folder = next(path for path in (setup.root, *setup.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{size_text(free)} free for {setup.root}"
    if free >= 10 * GIB:
        return found
    fix = "`kedro rlhf clean`, or another folder with --params=root=FOLDER"
    raise Unfit(found, fix, "warning" if free >= GIB else "failure")


def nodes(setup: Setup) -> str:
    """Every rank starts: its machine has the driver's files, code and libraries."""
    if setup.launch.mode == "local":
        return "this machine trains alone"
    layout = node_layout(setup.launch, setup.gpus)
    setup.root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nodes-", dir=setup.root.resolve()) as folder:
        rank = NodeProgram("platform", folder)  # of Python: it needs neither torch nor a job
        program = on_several_machines(rank, setup.launch, layout)
        code = None
        with program.running() as process, suppress(subprocess.TimeoutExpired):
            code = process.wait(START_S)
        if code == 0:
            return f"{program.ranks} ranks start on {len(layout.ranks)} machines"
        tail = log_tail(Path(folder))
        cause = f"found ranks that do not start within {START_S:g} s{tail}"
        if code is not None:
            cause = logged_cause(Path(folder)) or f"found exit code {code}{tail}"
        raise Unfit(cause, "correct what the output names; this machine must be the first one")


def run(setup: Setup) -> str:
    """The pipeline can start: stores answer, data and functions are sound, each stage fits."""
    setup.check_run()
    return "it passes the checks before its first stage"


CHECKS: Mapping[str, Callable[[Setup], str]] = {
    check.__name__.replace("_", " "): check
    for check in (compiler, gpu, kernels, shared_memory, disk, nodes, run)
}
"""All checks by their names, in the order of the table."""
