"""A stage's program on this machine: its command, its environment, and its end."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import rlhf_pipeline
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.program import DETERMINISTIC, LOOPBACK, RENDEZVOUS, SEPARATE_FILES
from rlhf_pipeline.stages.launch.layout import Layout
from rlhf_pipeline.stages.launch.resources import gpu_count, rank_devices, search_path
from rlhf_pipeline.stages.processes import guarded, process_identity, start

NODE_LAUNCHER = "rlhf_pipeline.distributed.node_launcher"
"""Module that starts the ranks of one machine."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the variable that configures torch's allocator of GPU memory."""
KILLED_S = 5.0
"""Seconds that killed processes have to disappear."""
POLL_S = 0.05


@dataclass(frozen=True)
class NodeProgram:
    """What one node runs of a launch."""

    program: str
    """Name of the module."""
    directory: str
    """The work directory, which contains job.json."""
    distributed: bool = True
    """Whether DeepSpeed's launcher starts ranks; otherwise one plain process."""
    ranks: tuple[int, ...] = (1,)
    """Number of ranks on each node."""
    node: int = 0
    """Number of this node."""
    address: str = LOOPBACK
    """Where the ranks meet: an address of node 0."""
    port: int = 0
    """The port there."""
    log: str = "program.log"
    """Name of the file with the output, in the work directory."""
    separate_files: bool = False
    """Whether this node does not share the file system of node 0."""
    deterministic: bool = False
    """`launch.deterministic`."""

    @property
    def own_ranks(self) -> range:
        return Layout(self.ranks).ranks_of(self.node)

    @property
    def command(self) -> list[str]:
        job_file = str(Path(self.directory) / "job.json")
        if not self.distributed:
            return [sys.executable, "-m", self.program, job_file]
        # The command `deepspeed` discards CUDA_VISIBLE_DEVICES and accepts numbers only. The
        # launcher that it starts on each machine takes any names of GPUs, one for each rank. It
        # reads the devices of its own node and counts those of the others.
        world = {f"node{node}": ["-1"] * ranks for node, ranks in enumerate(self.ranks)}
        world[f"node{self.node}"] = rank_devices(len(self.own_ranks))
        options: dict[str, Any] = {
            "world_info": base64.urlsafe_b64encode(json.dumps(world).encode()).decode(),
            **(
                {"node_rank": self.node, "master_addr": self.address} if len(self.ranks) > 1 else {}
            ),
            "master_port": self.port,
        }
        return [
            *(sys.executable, "-m", NODE_LAUNCHER),
            *(f"--{name}={value}" for name, value in options.items()),
            *("--no_local_rank", "--module", self.program, job_file),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """The program's environment: it has this package; the ranks share the cores."""
        source = Path(rlhf_pipeline.__file__).parent.parent
        # An empty part would be the working folder.
        paths = [str(source), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        settings = {
            "PATH": search_path(),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # a torch.py in the working folder is not the library
            "PYTHONUNBUFFERED": "1",
            # Otherwise transformers asks a bot on the hub for a conversion and loads the result.
            "DISABLE_SAFETENSORS_CONVERSION": "1",
            heartbeat.LAUNCH: f"{process_identity(os.getpid())} {Path(self.directory).resolve()}",
        }
        gpus, cores = gpu_count(), len(os.sched_getaffinity(0))
        defaults = {"OMP_NUM_THREADS": str(max(1, cores // len(self.own_ranks)))}
        if gpus and not os.environ.keys() & ALLOCATOR:
            # Packed batches differ in length; blocks of a fixed size would fragment the memory.
            defaults[ALLOCATOR[0]] = "expandable_segments:True"
        if self.distributed:
            settings["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"
            settings["TOKENIZERS_PARALLELISM"] = "false"  # each rank would use all cores
        if self.deterministic and gpus:
            # The variable of cuBLAS: without it, torch refuses products in its deterministic mode.
            settings |= {DETERMINISTIC: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if self.separate_files:
            settings[SEPARATE_FILES] = "1"
        return defaults | os.environ | settings

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the program; at the end of the block, kill it and every process it started."""
        environment = self.environment
        with (
            TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True) as private,
            (Path(self.directory) / self.log).open("wb") as output,
            guarded(environment[heartbeat.LAUNCH], environment["PYTHONPATH"]),
        ):
            if len(self.ranks) == 1:  # only this user reads the folder, so only ranks meet there
                environment[RENDEZVOUS] = f"{private}/store"
            process = start(
                self.command,
                environment,
                stdin=subprocess.DEVNULL,  # nobody can answer a library that asks a question
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                yield process
            finally:
                kill_group(process)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"ranks": tuple(fields["ranks"])})


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's process group, and wait a little until it is gone.

    Ranks would outlive their launcher otherwise. After a failure they cannot finish their step.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader, otherwise the empty group would still exist
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)
    process.wait()
