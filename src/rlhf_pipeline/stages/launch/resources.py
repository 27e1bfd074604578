"""What this machine offers to a launch: processes, GPUs, a free port."""

import os
import re
import shutil
import socket
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

from rlhf_pipeline.errors import ConfigError

GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""A GPU in CUDA_VISIBLE_DEVICES; the name of a MIG instance may contain slashes."""
SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Variables with the numbers of the GPUs that SLURM has allocated, for a job that lost
CUDA_VISIBLE_DEVICES."""


def gpu_count() -> int:
    """The number of GPUs that launched programs may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """The GPUs that launched programs may use, as numbers or UUIDs for CUDA_VISIBLE_DEVICES.

    They are found without importing torch. DS_ACCELERATOR=cpu hides all of them. Raises ConfigError
    if they cannot be determined, or one process could not use all of them.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _parsed(visible, "CUDA_VISIBLE_DEVICES")
    gpus = _listed()
    name = next((name for name in SLURM_GPUS if os.environ.get(name)), None)
    allocated = gpus if name is None else _parsed(os.environ[name], name)
    # SLURM counts all GPUs of the machine. Where it hides those of other jobs, nvidia-smi and CUDA
    # count the allocated ones from 0.
    return gpus if len(gpus) <= len(allocated) else allocated


def rank_devices(processes: int) -> list[str]:
    """The GPU of each rank on this machine; without a GPU, "-1", which hides all from CUDA."""
    return visible_gpus()[:processes] or ["-1"] * processes


def _parsed(value: str, name: str) -> list[str]:
    """The GPUs in the value of an environment variable. As in CUDA, -1 or nothing ends the list."""
    if value == "NoDevFiles":  # SLURM's word for no GPU
        return []
    found = [item.strip() for item in value.split(",")]
    gpus = list(takewhile(lambda item: item not in ("", "-1"), found))
    if len(set(gpus)) < len(gpus) or not all(map(GPU.fullmatch, gpus)):
        raise ConfigError(
            f"{name}: found {value!r}, expected different numbers or UUIDs (GPU-..., MIG-...), "
            "separated by commas. Fix: correct it, or empty it to train on the CPU"
        )
    if len(gpus) > 1 and any(gpu.startswith("MIG-") for gpu in gpus):
        raise ConfigError(
            f"{name}: found {len(gpus)} devices with MIG instances, expected a single instance, "
            "because CUDA shows a process one instance only. Fix: keep one of them"
        )
    return gpus


def _listed() -> list[str]:
    """The numbers of the GPUs that nvidia-smi lists; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if listing.returncode != 0 and "No devices" not in listing.stdout:
        reason = " ".join((listing.stdout + listing.stderr).split())
        raise ConfigError(
            f"nvidia-smi: found no GPUs because it failed ({reason}). Fix: repair the driver, or "
            "set CUDA_VISIBLE_DEVICES to the GPUs, or to nothing to train on the CPU"
        )
    return re.findall(r"^GPU (\d+):", listing.stdout, re.MULTILINE)


def search_path() -> str:
    """PATH of launched programs. Nobody may have activated the environment, which has ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def free_port(configured: int | None, address: str = "") -> int:
    """The configured port, or any free one. Raises ConfigError if the configured port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, configured or 0))
        except OSError:
            raise ConfigError(
                f"launch.master_port: port {configured} is in use. Fix: set another port, or null "
                "to pick a free one"
            ) from None
        return int(probe.getsockname()[1])


def meeting_address(name: str) -> str:
    """The address of this machine that a name stands for, at which other machines reach it.

    Raises ConfigError if it belongs to another machine, or other machines cannot reach it.
    """
    try:
        address = socket.gethostbyname(name)
        if address.startswith("127.") and address != name:
            raise OSError(f"it is {address}, which other machines cannot reach; see /etc/hosts")
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"launch.address: found {name}, expected an address of this machine ({error}). Fix: "
            "start `kedro run` on the first machine, or set launch.address"
        ) from error
    return address
