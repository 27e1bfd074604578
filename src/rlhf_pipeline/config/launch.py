"""How training programs are launched, of which only `processes` and `deterministic` can change a
result, and what a run shows."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlhf_pipeline.config.block import Block, operational


class ProgressConfig(Block):
    """What a run shows of its training."""

    answers: int = operational(3, ge=0)
    """Held-out prompts, the same ones each time, whose sampled answers with their scores each
    evaluation of PPO, GRPO and distillation shows: in the terminal, in MLflow's table answers.json,
    and on the page. 0: none."""


class LaunchConfig(Block):
    """Parameters of the `deepspeed` launcher."""

    processes: int | None = Field(default=None, ge=1)
    """Number of ranks (training processes) on each node; the number of all ranks must divide every
    global batch size. None: one per GPU, or two without a GPU; with a hostfile, its slots."""
    deterministic: bool = False
    """Repeat results bit for bit on GPUs as on CPUs (docs/cache.md), which costs some speed. A
    model with operations that have no fixed order is refused in its first step."""
    mode: Literal["local", "hostfile", "command"] = operational("local")
    """The machines (nodes) that train together (docs/cluster.md). local: this machine alone;
    hostfile: the hosts in `hostfile`; command: those on which `command` starts the ranks."""
    hostfile: str | None = operational(None)
    """DeepSpeed's file of hosts (`worker-1 slots=8`), of which the first is this machine."""
    launcher: Literal["pdsh", "openmpi", "mpich", "impi", "slurm"] = operational("pdsh")
    """DeepSpeed's launcher that starts the ranks of a hostfile."""
    launcher_args: str = operational("")
    """Further arguments of that launcher, as `deepspeed --launcher_args` takes them."""
    nodes: int | None = operational(None, ge=2)
    """Number of nodes with `command`, this machine included."""
    command: str | None = operational(None)
    """Command that starts {command}, on this machine as well: once for each rank, such as `srun
    --nodes=4 --ntasks-per-node=8 {command}`; or with {node} once for each node, such as `kubectl
    exec worker-{node} -- {command}`."""
    address: str | None = operational(None)
    """Address of this machine at which the ranks meet. None: the first host, or its own name."""
    node_timeout_s: float = operational(30.0, ge=5)
    """Seconds of silence after which nodes lose each other, and the stage ends everywhere."""
    continue_from: int | None = operational(None, ge=1)
    """Number of ranks of earlier runs, whose finished stages are reused and whose unfinished stage
    resumes on the present ranks. None: another number of ranks starts anew."""
    master_port: int | None = operational(None, ge=1024, le=65535)
    """TCP port at which ranks of several machines meet. None: a free port for each launch."""
    collective_timeout_s: float = operational(1800.0, gt=0)
    """Seconds that a rank waits for the others in a collective operation before the stage fails."""
    wait: bool = operational(True)
    """If another run executes the same recipe, wait and reuse its result. False: fail."""
    hang_timeout_s: float | None = operational(1500.0, gt=0)
    """Seconds without progress on any rank until the stage fails with the name of the slow rank;
    below `collective_timeout_s`, which reports less. None: no watchdog."""
    grace_s: float = operational(120.0, ge=0)
    """Seconds without progress that the ranks have after SIGTERM or Ctrl-C to write a checkpoint. A
    scheduler must wait longer (docs/troubleshooting.md)."""
    memory_check: Literal["refuse", "warn", "off"] = operational("refuse")
    """What `kedro run` does before it starts if the weights, gradients and optimizer states of a
    stage exceed the memory (docs/planning.md). If only activations or a cache may, it warns."""

    def _faults(self) -> Iterator[str]:
        needed = {"hostfile": ["hostfile"], "command": ["command", "nodes"]}.get(self.mode, [])
        for name in needed:
            if getattr(self, name) is None:
                yield f"{name}: found null, expected a value with mode {self.mode}. Fix: set it"
        if self.command is not None and "{command}" not in self.command:
            yield f"command: found {self.command!r}, expected it to contain {{command}}"
