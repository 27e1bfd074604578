"""A stage's program on one machine or several: its command, its environment, and its end."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import rlhf_pipeline
from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.heartbeat import FOLDER, LAUNCH, process_identity
from rlhf_pipeline.runtime.program import DETERMINISTIC, LOOPBACK, RENDEZVOUS
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.job import StageSpec
from rlhf_pipeline.stages.launch import start_rank
from rlhf_pipeline.stages.launch.resources import (
    Layout,
    free_port,
    gpu_count,
    meeting_address,
    node_layout,
    search_path,
    visible_gpus,
)
from rlhf_pipeline.stages.processes import guarded, kill_launch, start

PLAIN = re.compile(r"[\w@+=:,./-]+")  # a path that no shell and no launcher changes
NODE_LAUNCHER = "rlhf_pipeline.distributed.node_launcher"  # starts the ranks of one machine
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the variable that configures torch's allocator of GPU memory."""
REPEATABLE = {
    DETERMINISTIC: "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, torch refuses products in this mode
    "NCCL_ALGO": "Ring",  # adds in the order of the ranks; switches of NVLink add in any order
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # read by transformers
}
"""Variables of ranks on GPUs with `launch.deterministic`."""
LOG = "program.log"  # the output of all processes, in the work directory


@dataclass(frozen=True)
class NodeProgram:
    """A stage's program on this machine; `ClusterProgram` is one on several machines."""

    program: str  # the module
    directory: str  # the work directory, which contains job.json
    distributed: bool = True
    """Whether DeepSpeed's launcher starts ranks; otherwise one plain process."""
    ranks: int = 1
    address: str = LOOPBACK  # where the ranks meet
    port: int = 0
    deterministic: bool = False  # launch.deterministic

    @property
    def command(self) -> list[str]:
        launcher = [sys.executable, "-m"]
        if self.distributed:
            # Without a GPU, "-1" hides all of them from CUDA.
            devices = visible_gpus()[: self.ranks] or ["-1"] * self.ranks
            launcher = [*launcher_of_machine([devices], 0, self.address, self.port), "--module"]
        return [*launcher, self.program, str(Path(self.directory) / "job.json")]

    @property
    def environment(self) -> dict[str, str]:
        return self.defaults | os.environ | self.settings | {"PATH": search_path()}

    @property
    def defaults(self) -> dict[str, str]:
        """Variables of the ranks that the user may set: they share the cores and the GPU memory."""
        found = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self.ranks))}
        if gpu_count() and not os.environ.keys() & ALLOCATOR:
            # Packed batches differ in length; blocks of a fixed size would fragment the memory.
            found[ALLOCATOR[0]] = "expandable_segments:True"
        return found

    @property
    def settings(self) -> dict[str, str]:
        """Variables of the ranks on every machine; the programs find this package."""
        source = Path(rlhf_pipeline.__file__).parent.parent
        # An empty part would be the working folder.
        paths = [str(source), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        found = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # a torch.py in the working folder is not the library
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",  # libraries that generate tasks go through sets of texts
            # Otherwise transformers asks a bot on the hub for a conversion and loads the result.
            "DISABLE_SAFETENSORS_CONVERSION": "1",
            LAUNCH: f"{process_identity(os.getpid())} {Path(self.directory).resolve()}",
        }
        gpus = gpu_count()
        if self.distributed:
            found["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"
            found["TOKENIZERS_PARALLELISM"] = "false"  # each rank would use all cores
        if self.deterministic and gpus:
            found |= REPEATABLE
        return found

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the program; at the end of the block, kill it and every process it started."""
        with (  # only this user reads the folder, so only ranks meet there
            TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True) as private,
            started(self, private) as process,
        ):
            yield process


def launcher_of_machine(
    devices: Sequence[Sequence[str]], node: int, address: str, port: int
) -> list[str]:
    """DeepSpeed's launcher of the ranks on one node, without their program.

    The command `deepspeed` discards CUDA_VISIBLE_DEVICES and accepts numbers only. The launcher
    that it starts on each machine takes any names of GPUs: `devices`, one for each rank, by node.
    """
    world = {f"node{number}": names for number, names in enumerate(devices)}
    options = {
        "world_info": base64.urlsafe_b64encode(json.dumps(world).encode()).decode(),
        **({"node_rank": node, "master_addr": address} if len(devices) > 1 else {}),
        "master_port": port,
    }
    return [
        *(sys.executable, "-P", "-m", NODE_LAUNCHER),
        *(f"--{name}={value}" for name, value in options.items()),
        "--no_local_rank",
    ]


@contextmanager
def started(program: NodeProgram, private: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start a program's command; at the end of the block, kill all of it.

    Ranks on this machine would outlive their launcher otherwise; they meet in the folder `private`.
    """
    environment = program.environment | ({RENDEZVOUS: f"{private}/store"} if private else {})
    with (
        (Path(program.directory) / LOG).open("wb") as output,
        guarded(environment[LAUNCH], environment["PYTHONPATH"], private),
    ):
        process = start(
            program.command,
            environment,
            stdin=subprocess.DEVNULL,  # nobody can answer a library that asks a question
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            kill_launch(environment[LAUNCH])
            process.wait()


@dataclass(frozen=True, kw_only=True)
class ClusterProgram(NodeProgram):
    """A stage's program on several machines."""

    config: LaunchConfig
    layout: Layout
    pulse: Pulse  # that the ranks follow

    @property
    def command(self) -> list[str]:
        """The command that starts all ranks, with one process for each of its parts.

        Its arguments pass through shells of other machines and contain no secret.
        """
        waits = f"{self.pulse.timeout_s:g}"
        rank = [start_rank.__file__, self.directory, self.pulse.launch, waits]
        if self.config.mode == "hostfile":
            return [*self._deepspeed(), *rank]
        template = str(self.config.command)
        if "{node}" not in template:
            each = shlex.join([sys.executable, "-P", "-u", *rank])
            return shlex.split(template.replace("{command}", each))
        devices = [[*map(str, range(ranks))] for ranks in self.layout.ranks]
        # Bash's `wait -n` forgets one of two commands that end at the same moment.
        script = "exec 3>&1; { "
        for node in range(len(devices)):
            launcher = launcher_of_machine(devices, node, self.address, self.port)
            each = template.replace("{command}", shlex.join([*launcher, *rank]))
            script += f"{{ ({each.replace('{node}', str(node))}) >&3; echo $?; }} & "
        ends = "read code && [ $code = 0 ] || exit ${code:-1}; " * len(devices)
        return ["bash", "-c", f"{script}}} | {{ {ends}}}"]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of that command, without the variables of MLflow, which may be secret:
        DeepSpeed writes those with PYTHON, NCCL or MLFLOW in their names on command lines."""
        own = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
        alive_s = max(1, int(self.config.node_timeout_s / 3))
        ssh = (
            f"{own.get('PDSH_SSH_ARGS_APPEND', '')} -o BatchMode=yes -o ConnectTimeout=15 "
            f"-o ServerAliveInterval={alive_s} -o ServerAliveCountMax=2"
        )
        settings = self.settings
        return own | {
            "PDSH_SSH_ARGS_APPEND": ssh.strip(),
            **{name: settings[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH", LAUNCH)},
        }

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the ranks on all machines; at the end of the block, end them everywhere."""
        with self.pulse.beating():
            if self.config.mode == "hostfile":
                hosts = zip(self.layout.hosts, self.layout.ranks, strict=True)
                lines = [f"{host} slots={ranks}\n" for host, ranks in hosts]
                self._hostfile.write_text("".join(lines))
            with started(self) as process:
                yield process

    @property
    def _hostfile(self) -> Path:
        return Path(self.directory) / FOLDER / "hostfile"

    def _deepspeed(self) -> list[str]:
        launcher_args = self.config.launcher_args
        if self.config.launcher == "slurm":  # the other ranks would wait for one that has failed
            launcher_args = f"--kill-on-bad-exit=1 {launcher_args}".strip()
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner", "--force_multi"),
            f"--hostfile={self._hostfile}",
            f"--launcher={self.config.launcher}",
            *([f"--launcher_args={launcher_args}"] if launcher_args else []),
            "--no_ssh_check",  # it hides the reason, which pdsh shows
            f"--master_addr={self.address}",
            f"--master_port={self.port}",
            "--no_local_rank",
        ]


def program_of(spec: StageSpec, directory: str, config: LaunchConfig) -> NodeProgram:
    """The program of a stage with a work directory, where `launch` says that it runs."""
    program = NodeProgram(spec.program, directory, spec.distributed)
    if not spec.distributed:
        return program
    layout = node_layout(config, gpu_count())
    program = replace(program, ranks=layout.ranks[0], deterministic=config.deterministic)
    if len(layout.ranks) > 1:
        return on_several_machines(program, config, layout)
    return replace(program, port=free_port(config.master_port))


def on_several_machines(
    program: NodeProgram, config: LaunchConfig, layout: Layout
) -> ClusterProgram:
    """The same program on the machines of a layout.

    Raises ConfigError if the ranks could not meet at this machine, or the path of the work
    directory would not reach the other machines unchanged.
    """
    directory = Path(program.directory).absolute()
    if PLAIN.fullmatch(str(directory)) is None:
        raise ConfigError(
            f"root: found {directory}, expected letters, digits and @+=:,./_- in the path: "
            f"the launchers of several machines (launch.mode: {config.mode}) pass it to shells"
        )
    address = meeting_address(layout.address)
    port, ranks = free_port(config.master_port, address), sum(layout.ranks)
    program = replace(program, directory=str(directory), ranks=ranks, address=address, port=port)
    plan = {
        "program": program.program,
        "folder": str(Path.cwd()),
        "defaults": replace(program, ranks=max(layout.ranks)).defaults,
        "settings": {
            **program.settings,
            **{"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)},
        },
        "installation": start_rank.installation(),
    }
    pulse = Pulse(directory, config.node_timeout_s, plan)
    return ClusterProgram(**vars(program), config=config, layout=layout, pulse=pulse)
