"""A launch on several machines: DeepSpeed's launcher or a command of the user starts the ranks."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.heartbeat import FOLDER, LAUNCH
from rlhf_pipeline.runtime.pulse import Pulse
from rlhf_pipeline.stages.launch import start_rank
from rlhf_pipeline.stages.launch.layout import Layout
from rlhf_pipeline.stages.launch.node_program import NodeProgram, launcher_of_machine, started
from rlhf_pipeline.stages.launch.resources import free_port, meeting_address

PLAIN = re.compile(r"[\w@+=:,./-]+")
"""A path that no shell and no launcher changes."""


@dataclass(frozen=True, kw_only=True)
class ClusterProgram(NodeProgram):
    """A stage's program on several machines."""

    config: LaunchConfig
    layout: Layout
    pulse: Pulse
    """What the ranks follow."""

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
        devices = [[str(number) for number in range(ranks)] for ranks in self.layout.ranks]
        script = ""
        for node in range(len(devices)):
            launcher = launcher_of_machine(devices, node, self.address, self.port)
            each = template.replace("{command}", shlex.join([*launcher, *rank]))
            script += "(" + each.replace("{node}", str(node)) + ") & "
        return ["bash", "-c", script + "wait -n || exit; " * len(devices)]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of that command. DeepSpeed writes variables with PYTHON, NCCL or MLFLOW
        in their names on command lines, so those of MLflow, which may be secret, are left out."""
        own = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
        alive_s = max(1, int(self.config.node_timeout_s / 3))
        ssh = (
            f"-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval={alive_s} "
            "-o ServerAliveCountMax=2"
        )
        settings = self.settings
        return own | {
            "PDSH_SSH_ARGS_APPEND": f"{own.get('PDSH_SSH_ARGS_APPEND', '')} {ssh}".strip(),
            **{name: settings[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH", LAUNCH)},
        }

    @contextmanager
    def running(self) -> Iterator[Popen[bytes]]:
        """Start the ranks on all machines; at the end of the block, end them everywhere."""
        with self.pulse.beating():
            if self.config.mode == "hostfile":
                self._hostfile.write_text(
                    "".join(
                        f"{host} slots={ranks}\n"
                        for host, ranks in zip(self.layout.hosts, self.layout.ranks, strict=True)
                    )
                )
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


def on_several_machines(
    program: NodeProgram, config: LaunchConfig, layout: Layout
) -> ClusterProgram:
    """The same program on the machines of a layout.

    Raises ConfigError if the ranks could not meet at this machine, or the path of the work
    directory would not reach the other machines unchanged.
    """
    program = replace(program, directory=str(Path(program.directory).absolute()))
    if PLAIN.fullmatch(program.directory) is None:
        raise ConfigError(
            f"root: found {program.directory}, expected letters, digits and @+=:,./_- in the path: "
            f"the launchers of several machines (launch.mode: {config.mode}) pass it to shells"
        )
    address = meeting_address(layout.address)
    port = free_port(config.master_port, address)
    program = replace(program, ranks=sum(layout.ranks), address=address, port=port)
    settings = program.settings | {
        "WORLD_SIZE": str(program.ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    plan = {
        "program": program.program,
        "folder": str(Path.cwd()),
        "defaults": replace(program, ranks=max(layout.ranks)).defaults,
        "settings": settings,
        "installation": start_rank.installation(),
    }
    pulse = Pulse(Path(program.directory), config.node_timeout_s, plan)
    return ClusterProgram(**vars(program), config=config, layout=layout, pulse=pulse)
