"""The checks of a machine. A check returns what it finds, or raises `Unfit` with the fix."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import StageError, pip_install
from rlhf_pipeline.sizing.fit import size_text
from rlhf_pipeline.sizing.hardware import GIB
from rlhf_pipeline.stages.launch.failure import log_tail, logged_cause
from rlhf_pipeline.stages.launch.node_program import NodeProgram, on_several_machines
from rlhf_pipeline.stages.launch.resources import node_layout, search_path, visible_gpus

DISTRIBUTION = "rlhf-pipeline"
SOURCE = "#include <vector>\n#include <Python.h>\nint main() { return 0; }\n"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the file system, not a file
SHARED_BYTES = GIB
"""Below this size ranks on GPUs may fail: containers have 64 MiB by default."""
DISK_BYTES = 10 * GIB
"""Below this free space a warning: one checkpoint of a model of 0.6 billion parameters."""
BUDGET_S = 30.0
"""Seconds until a program of a check counts as failed. The slowest imports torch, which takes some
seconds on a cold disk."""
START_S = 60.0
"""Seconds in which a rank must start on every machine: DeepSpeed's launchers import torch."""
RANK = "platform"
"""A module of Python that says where it runs, and needs neither torch nor a job."""
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
"""Runs in a process of its own: the driver never imports torch."""
SELF_CHECK = "rlhf_pipeline.models.self_check"
"""Module that runs in a process of its own, like the probe."""


class Unfit(Exception):  # noqa: N818 - what a machine is, not an error
    """What is wrong with a machine, and what to do."""

    def __init__(self, found: str, fix: str, *, is_warning: bool = False) -> None:
        super().__init__(found)
        self.found, self.fix, self.is_warning = found, fix, is_warning


@dataclass(frozen=True)
class Setup:
    """A configuration and the machine that is to run it."""

    root: Path
    """Folder of all results."""
    launch: LaunchConfig
    compiles: tuple[str, ...]
    """The parameters, with values, for which a machine with GPUs compiles code at first use."""
    precisions: Sequence[str] = ("fp32",)
    """The default precision, and those of the configuration."""

    @cached_property
    def gpus(self) -> int:
        """GPUs that training programs may use. Raises ConfigError if they cannot be counted."""
        return len(visible_gpus())

    @cached_property
    def ranks(self) -> int:
        """Training processes on this machine."""
        return node_layout(self.launch, self.gpus).ranks[0]


def python(_: Setup) -> str:
    """The interpreter is one that the tests run with."""
    tested = str(metadata.metadata(DISTRIBUTION)["Requires-Python"])
    found = platform.python_version()
    if SpecifierSet(tested).contains(found, prereleases=True):
        return found
    raise Unfit(f"{found}, expected {tested}", f"create the environment with a Python of {tested}")


def libraries(_: Setup) -> str:
    """Every dependency is installed, in the range that the package declares."""
    required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    needed = [each for each in required if each.marker is None or each.marker.evaluate()]
    faults = {each: fault for each in needed if (fault := _fault(each)) is not None}
    if not faults:
        return f"{len(needed)} in their tested ranges"
    names = " ".join(f"'{each.name}{each.specifier}'" for each in faults)
    raise Unfit("; ".join(faults.values()), f"{pip_install()}{names}")


def _fault(requirement: Requirement) -> str | None:
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found}, expected {requirement.specifier}"


def compiler(setup: Setup) -> str:
    """A C++ compiler, Python's headers and ninja, for DeepSpeed's CPU Adam and vLLM's kernels."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    missing = [] if command else ["a C++ compiler"]
    if command:
        include = f"-I{sysconfig.get_path('include')}"
        compiling = [command, "-x", "c++", "-fsyntax-only", include, "-"]
        done = subprocess.run(compiling, input=SOURCE, capture_output=True, text=True, check=False)
        missing += [] if done.returncode == 0 else ["headers of Python or C++"]
    missing += [] if shutil.which("ninja", path=search_path()) else ["ninja"]
    if not missing:
        return f"{command}, ninja"
    found = f"missing: {', '.join(missing)}"
    if not (setup.compiles and setup.gpus > 0):
        return f"{found}; only offload_optimizer and generator vllm on a GPU need them"
    change = f"change {', '.join(setup.compiles)}"
    fix = f"apt-get install g++ python3-dev, pip install ninja; or {change}"
    raise Unfit(found, fix)


def gpu(setup: Setup) -> str:
    """Torch can compute on every GPU that the ranks would use, and has NCCL for several."""
    if setup.gpus == 0:
        return f"none; {setup.ranks} ranks train on the CPU"
    command = [sys.executable, "-P", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUDGET_S, check=False)
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = "install the torch that fits the driver and the GPU"
        raise Unfit(f"torch fails: {error}", fix)
    version, built_for, names, nccl = json.loads(done.stdout.splitlines()[-1])
    if built_for is None:
        fix = "install torch with CUDA, or set DS_ACCELERATOR=cpu to train on the CPU"
        raise Unfit(f"{setup.gpus} GPUs, but torch {version} has no CUDA", fix)
    if len(names) < setup.gpus:
        found = (
            f"torch {version} for CUDA {built_for} sees {len(names)} of {setup.gpus} GPUs with "
            f"driver {_driver()}"
        )
        fix = "update the driver, or install torch for an older CUDA"
        raise Unfit(found, fix)
    if setup.gpus > 1 and nccl is None:
        raise Unfit("torch has no NCCL", "install torch with CUDA for Linux")
    kinds = ", ".join(dict.fromkeys(names))
    return f"{setup.gpus} x {kinds}; torch {version}, CUDA {built_for}, driver {_driver()}"


def kernels(setup: Setup) -> str:
    """Each kind of GPU computes what the CPU computes."""
    if setup.gpus == 0:
        return "none; a CPU runs the plain forms"
    command = [sys.executable, "-P", "-m", SELF_CHECK, *setup.precisions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUDGET_S, check=False)
    passed = done.stdout.splitlines()
    if done.returncode != 0 or not passed:
        raise StageError((done.stderr.strip().splitlines() or ["torch sees no GPU"])[-1])
    return f"equal those of the CPU: {', '.join(passed)}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return (done.stdout.split() or ["unknown"])[0]


def shared_memory(setup: Setup) -> str:
    """Ranks of one machine and data loaders exchange tensors in /dev/shm."""
    if not SHARED_MEMORY.is_dir():
        raise Unfit(f"{SHARED_MEMORY} does not exist", "mount a tmpfs at /dev/shm")
    space = shutil.disk_usage(SHARED_MEMORY)
    found = f"{size_text(space.free)} free of {size_text(space.total)}"
    if space.free >= SHARED_BYTES or (setup.gpus < 2 and space.free >= SHARED_BYTES / 16):
        return found
    fix = "start the container with --shm-size=8g, or remove files that ended programs left there"
    raise Unfit(found, fix)


def disk(setup: Setup) -> str:
    """Space for results where they are written; stages check the exact need before they write."""
    folder = next(path for path in (setup.root, *setup.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{size_text(free)} free for {setup.root}"
    if free >= DISK_BYTES:
        return found
    fix = "`kedro rlhf clean`, or another folder with --params=root=FOLDER"
    raise Unfit(found, fix, is_warning=free >= GIB)


def nodes(setup: Setup) -> str:
    """Every rank starts: its machine has the driver's files, code and libraries."""
    if setup.launch.mode == "local":
        return "this machine trains alone"
    layout = node_layout(setup.launch, setup.gpus)
    setup.root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="nodes-", dir=setup.root.resolve()) as folder:
        program = on_several_machines(NodeProgram(RANK, folder), setup.launch, layout)
        with program.running() as process:
            try:
                code: int | None = process.wait(START_S)
            except subprocess.TimeoutExpired:
                code = None
        if code == 0:
            return f"{program.ranks} ranks start on {len(layout.ranks)} machines"
        tail = log_tail(Path(folder))
        if code is None:
            cause = f"found ranks that do not start within {START_S:g} s{tail}"
        else:
            cause = logged_cause(Path(folder)) or f"found exit code {code}{tail}"
        fix = "mend what the output says; the first machine must be this one"
        raise Unfit(cause, fix)


Check = Callable[[Setup], str]
CHECKS: Mapping[str, Check] = {
    "python": python,
    "libraries": libraries,
    "compiler": compiler,
    "gpu": gpu,
    "kernels": kernels,
    "shared memory": shared_memory,
    "disk": disk,
    "nodes": nodes,
}
"""All checks by their names, in the order of the table."""
