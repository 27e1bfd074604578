"""The nodes (machines) of a run and the ranks on each, known before anything is launched."""

import re
import socket
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
    """The nodes of a run. The first is the driver's."""

    ranks: tuple[int, ...]
    """Number of ranks on each node."""
    address: str = LOOPBACK
    """Name or address of the first node."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes, if they are known."""


def node_layout(config: LaunchConfig, gpus: int) -> Layout:
    """The nodes of a run, from its configuration.

    Args:
        config: the block `launch`.
        gpus: GPUs of this machine; nodes without slots in a hostfile have as many.

    Raises:
        ConfigError: the hostfile is missing or incomplete.
    """
    here = config.processes or gpus or 2
    if config.mode == "hostfile":
        return _of_hostfile(config)
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
