"""The nodes (machines) of a run and the ranks on each, known before anything is launched."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.program import LOOPBACK
from rlhf_pipeline.sizing.hardware import Hardware, at_hand
from rlhf_pipeline.stages.launch.resources import visible_gpus

HOST = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class Layout:
    """The nodes of a run. Node 0 is the driver's."""

    ranks: tuple[int, ...]
    """Number of ranks on each node."""
    address: str = LOOPBACK
    """Name or address of node 0."""
    node: int = 0
    """Number of this node."""
    is_idle: bool = False
    """The scheduler started several processes on this node, and another one does the work."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes, if they are known."""

    def ranks_of(self, node: int) -> range:
        first = sum(self.ranks[:node])
        return range(first, first + self.ranks[node])


@dataclass(frozen=True)
class Scheduler:
    """Environment variables by which a scheduler tells a process where it runs."""

    name: str
    node: str
    nodes: str
    address: Callable[[Mapping[str, str]], str | None]
    local_rank: str = "LOCAL_RANK"


def _variable(name: str) -> Callable[[Mapping[str, str]], str | None]:
    """The first word of a variable."""
    return lambda environment: next(iter(environment.get(name, "").split()), None)


def _first_of_slurm(environment: Mapping[str, str]) -> str | None:
    """The first host of SLURM's short list, such as node[1-3,7]."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if "[" not in listed:
        return listed.split(",")[0] or None
    if shutil.which("scontrol") is None:
        return None
    command = ["scontrol", "show", "hostnames", listed]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return next(iter(found), None)


SCHEDULERS = (
    Scheduler("NODE_RANK", "NODE_RANK", "NNODES", _variable("MASTER_ADDR")),
    Scheduler("torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE", _variable("MASTER_ADDR")),
    Scheduler("deepspeed --no_ssh", "CROSS_RANK", "CROSS_SIZE", _variable("MASTER_ADDR")),
    Scheduler("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", _variable("PET_MASTER_ADDR")),
    Scheduler(
        "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", _variable("SKYPILOT_NODE_IPS")
    ),
    Scheduler("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", _variable("DSTACK_MASTER_NODE_IP")),
    Scheduler("SLURM", "SLURM_NODEID", "SLURM_NNODES", _first_of_slurm, "SLURM_LOCALID"),
)
"""The first whose variables are set is taken: torchrun may itself run under SLURM."""


def node_layout(config: LaunchConfig, gpus: int) -> Layout:
    """The nodes of a run, from its configuration and the scheduler's environment.

    Args:
        config: the block `launch`.
        gpus: GPUs of this machine; nodes without slots in a hostfile have as many.

    Raises:
        ConfigError: the hostfile or the environment is missing or incomplete.
    """
    here = config.processes or gpus or 2
    if config.mode == "hostfile":
        return _of_hostfile(config)
    if config.mode == "rank_env":
        return _of_environment(config, here)
    if config.mode == "command":
        address = config.address or socket.gethostname()
        return Layout((here,) * (config.nodes or 1), address)
    return Layout((here,))


def rank_count(config: LaunchConfig, gpus: int) -> int:
    """Ranks of a launch on all nodes."""
    return sum(node_layout(config, gpus).ranks)


def hardware_at_hand(config: LaunchConfig) -> Hardware:
    """The GPUs, or the main memory, that the ranks of a launch have."""
    gpus = visible_gpus()
    layout = node_layout(config, len(gpus))
    return at_hand(layout.ranks, gpus)


def _of_hostfile(config: LaunchConfig) -> Layout:
    file = Path(str(config.hostfile)).expanduser()
    if not file.is_file():
        raise ConfigError(f"launch.hostfile: found no file {file}. Fix: check the spelling")
    hosts: dict[str, int] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        match = HOST.fullmatch(text)
        if match is None and text:
            raise ConfigError(
                f"launch.hostfile: found {text!r} in line {number} of {file}, expected a host and "
                "its ranks, such as worker-1 slots=8"
            )
        if match is not None and match[1] in hosts:
            raise ConfigError(
                f"launch.hostfile: found {match[1]} twice in {file}, expected each host once"
            )
        if match is not None:
            hosts[match[1]] = config.processes or int(match[2])
    if len(hosts) < 2:
        raise ConfigError(
            f"launch.hostfile: found {len(hosts)} hosts in {file}, expected at least 2. Fix: add "
            "hosts, or set launch.mode to local"
        )
    address = config.address or next(iter(hosts))
    return Layout(tuple(hosts.values()), address, hosts=tuple(hosts))


def _of_environment(config: LaunchConfig, here: int) -> Layout:
    for scheduler in SCHEDULERS:
        if scheduler.node not in os.environ or scheduler.nodes not in os.environ:
            continue
        found = os.environ[scheduler.node], os.environ[scheduler.nodes]
        if not all(map(str.isdigit, found)) or not int(found[0]) < int(found[1]):
            raise ConfigError(
                f"launch.mode: found {scheduler.node}={found[0]} and {scheduler.nodes}={found[1]}, "
                "expected the number of this node, from 0, and the number of nodes"
            )
        address = config.address or scheduler.address(os.environ)
        if address is None:
            raise ConfigError(
                f"launch.address: found null, and {scheduler.name} names no master. Fix: set "
                "launch.address to the name of node 0, or export MASTER_ADDR"
            )
        is_idle = os.environ.get(scheduler.local_rank, "0") != "0"
        return Layout((here,) * int(found[1]), address, int(found[0]), is_idle)
    known = ", ".join(f"{each.node} and {each.nodes} ({each.name})" for each in SCHEDULERS[1:])
    raise ConfigError(
        "launch.mode: found rank_env, but none of the variables by which a scheduler names this "
        f"node: NODE_RANK and NNODES, {known}. Fix: export NODE_RANK, NNODES and MASTER_ADDR on "
        "every node"
    )
