"""What a launch has: the nodes (machines), the ranks on each, GPUs, and a free port."""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.program import LOOPBACK
from rlhf_pipeline.sizing.hardware import Hardware, at_hand

HOST = re.compile(r"(\S+)\s+slots=(\d+)")
GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""A GPU in CUDA_VISIBLE_DEVICES; the name of a MIG instance may contain slashes."""


def gpu_count() -> int:
    """The number of GPUs that launched programs may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """The GPUs that launched programs may use, as numbers or UUIDs for CUDA_VISIBLE_DEVICES.

    DS_ACCELERATOR=cpu hides all of them. Raises ConfigError if they cannot be determined, or one
    process could not use all of them.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _listed()
    if value == "NoDevFiles":  # SLURM's word for no GPU
        return []
    found = [item.strip() for item in value.split(",")]
    gpus = list(takewhile(lambda item: item not in ("", "-1"), found))  # as in CUDA
    if len(set(gpus)) < len(gpus) or not all(map(GPU.fullmatch, gpus)):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: found {value!r}, expected different numbers or "
            "UUIDs (GPU-..., MIG-...), separated by commas. Fix: correct it, or "
            "empty it to train on the CPU"
        )
    if len(gpus) > 1 and any(gpu.startswith("MIG-") for gpu in gpus):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: found {len(gpus)} devices with MIG instances, expected a "
            "single instance, because CUDA shows a process one instance only. Fix: keep one of them"
        )
    return gpus


def _listed() -> list[str]:
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


@dataclass(frozen=True)
class Layout:
    """The nodes of a run. The first is the driver's."""

    ranks: tuple[int, ...]  # on each node
    address: str = LOOPBACK  # name or address of the first node
    hosts: tuple[str, ...] = ()  # names of the nodes, if they are known


def node_layout(config: LaunchConfig, gpus: int) -> Layout:
    """The nodes of the block `launch`, if this machine has that many GPUs.

    Raises ConfigError if the hostfile is missing or incomplete.
    """
    if config.mode == "hostfile":
        return _of_hostfile(config)
    here = config.processes or gpus or 2
    if config.mode == "command":
        return Layout((here,) * (config.nodes or 1), config.address or socket.gethostname())
    return Layout((here,))


def rank_count(config: LaunchConfig, gpus: int) -> int:
    """Ranks of a launch on all nodes."""
    return sum(node_layout(config, gpus).ranks)


def hardware_at_hand(config: LaunchConfig) -> Hardware:
    """The GPUs, or the main memory, that the ranks of a launch have."""
    gpus = visible_gpus()
    return at_hand(node_layout(config, len(gpus)).ranks, gpus)


def _of_hostfile(config: LaunchConfig) -> Layout:
    file = Path(str(config.hostfile)).expanduser()
    if not file.is_file():
        raise ConfigError(f"launch.hostfile: found no file {file}. Fix: check the spelling")
    hosts: dict[str, int] = {}
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    for line in filter(None, lines):
        match = HOST.fullmatch(line)
        if match is None or match[1] in hosts:
            raise ConfigError(
                f"launch.hostfile: found {line!r} in {file}, expected each host once with its "
                "ranks, such as worker-1 slots=8. Fix: correct the line"
            )
        hosts[match[1]] = config.processes or int(match[2])
    if len(hosts) < 2:
        raise ConfigError(
            f"launch.hostfile: found {len(hosts)} hosts in {file}, expected at least 2. Fix: add "
            "hosts, or set launch.mode to local"
        )
    address = config.address or next(iter(hosts))
    return Layout(tuple(hosts.values()), address, hosts=tuple(hosts))
