"""How training programs are launched. Only `processes` and `deterministic` can change a result."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_pipeline.config.block import Block, operational


class LaunchConfig(Block):
    """Parameters of the `deepspeed` launcher."""

    processes: int | None = Field(default=None, ge=1)
    """Number of ranks (training processes) on each node. Every global batch size must be a multiple
    of the number of all ranks, which is part of the recipe, because it changes the order of
    floating-point sums. None: one per GPU, or two without a GPU; with a hostfile, its slots."""
    deterministic: bool = False
    """Repeat results bit for bit on GPUs (docs/cache.md), as a CPU always does. Attention and
    matrix products then add in a fixed order, which costs some speed. A model with operations that
    have no fixed order is refused in its first step. Part of the recipe if true."""
    mode: Literal["local", "hostfile", "command"] = operational("local")
    """The machines (nodes) that train together (docs/cluster.md). local: this machine alone.
    hostfile: the hosts in `hostfile`, on which DeepSpeed's launcher starts the ranks. command: the
    machines on which `command` starts the ranks. `kedro run` runs on the first machine only."""
    hostfile: str | None = operational(None)
    """DeepSpeed's file of hosts, with lines such as `worker-1 slots=8`. The first host is this
    machine. No other file, such as /job/hostfile, is read."""
    launcher: Literal["pdsh", "openmpi", "mpich", "impi", "slurm"] = operational("pdsh")
    """DeepSpeed's launcher that starts the ranks of a hostfile."""
    launcher_args: str = operational("")
    """Further arguments of that launcher, as `deepspeed --launcher_args` takes them."""
    nodes: int | None = operational(None, ge=2)
    """Number of nodes with `command`, this machine included."""
    command: str | None = operational(None)
    """Command that starts the ranks, on this machine as well. It either starts {command} once for
    each rank, such as `srun --nodes=4 --ntasks-per-node=8 {command}`; or it contains {node} and
    runs once for each number from 0, such as `kubectl exec worker-{node} -- {command}`. {command}
    then starts all ranks of that node."""
    address: str | None = operational(None)
    """Name or address of this machine at which the ranks meet. None: the first host of the
    hostfile, or the name of this machine."""
    node_timeout_s: float = operational(30.0, ge=5)
    """Seconds of silence after which a node counts as lost, and the stage ends everywhere. The
    ranks end themselves if they do not hear of this machine for so long."""
    continue_from: int | None = operational(None, ge=1)
    """Number of ranks of earlier runs: their finished stages are reused, and an unfinished stage
    resumes from its checkpoint on the present ranks. None: another number of ranks starts anew."""
    master_port: int | None = operational(None, ge=1024, le=65535)
    """TCP port at which ranks of several machines meet. None: a free port for each launch."""
    collective_timeout_s: float = operational(1800.0, gt=0)
    """Seconds that a rank waits for the others in a collective operation before the stage fails."""
    wait: bool = operational(True)
    """If another run executes the same recipe, wait and reuse its result. False: fail."""
    hang_timeout_s: float | None = operational(1500.0, gt=0)
    """Seconds without progress on any rank (micro batch, sampled token or new phase) until the
    stage fails with the name of the slow rank. The ranks have at least five minutes to start. Keep
    it below `collective_timeout_s`, which reports less. None: no watchdog."""
    grace_s: float = operational(120.0, ge=0)
    """Seconds that the ranks have, after SIGTERM or Ctrl-C to `kedro run`, to finish their step and
    write a checkpoint before they are killed. The time starts anew whenever a rank makes progress
    in writing. A second Ctrl-C kills them at once. A scheduler must wait longer
    (docs/troubleshooting.md)."""
    memory_check: Literal["refuse", "warn", "off"] = operational("refuse")
    """What `kedro run` does before it starts if the weights, gradients and optimizer states of a
    stage exceed the memory of a GPU, or on the CPU main memory: refuse, warn, or nothing
    (docs/planning.md). If only activations or the key-value cache may exceed it, it warns."""

    def _faults(self) -> Iterator[str]:
        needed = {"hostfile": ["hostfile"], "command": ["command", "nodes"]}.get(self.mode, [])
        for name in needed:
            if getattr(self, name) is None:
                yield f"{name}: found null, expected a value with mode {self.mode}. Fix: set it"
        if self.command is not None and "{command}" not in self.command:
            yield f"command: found {self.command!r}, expected it to contain {{command}}"
