"""The other nodes of a run: the driver starts their agents once and keeps their connections."""

import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

from rlhf_pipeline.config.launch import LaunchConfig
from rlhf_pipeline.errors import ConfigError, PipelineError, StageError
from rlhf_pipeline.stages.launch.agent import AGENT, description, serve
from rlhf_pipeline.stages.launch.layout import Layout, node_layout
from rlhf_pipeline.stages.launch.link import TOKEN, Link
from rlhf_pipeline.stages.launch.node_program import kill_group
from rlhf_pipeline.stages.launch.remote_node import RemoteNode
from rlhf_pipeline.stages.launch.resources import gpu_count
from rlhf_pipeline.stages.processes import start

POLL_S = 0.2
CLOSE_S = 60.0
"""Seconds that a finished run waits for nodes that a scheduler started and that do not know it."""
GOODBYE_S = 10.0
"""Seconds that the agents have to end."""
SKEW_S = 5.0
"""Seconds by which the clock of a node may differ: reports are ordered by time."""


class Cluster:
    """The agents of the other nodes; none with `launch.mode: local`.

    With `rank_env`, nodes may connect as soon as this object exists. In the other modes the agents
    are started when the first stage needs them, so a run that reuses all stages starts none.
    """

    def __init__(self, config: LaunchConfig | None = None) -> None:
        """Raises ConfigError if the address is none of this machine, or the port is in use."""
        self._config = config or LaunchConfig()
        is_local = self._config.mode == "local"
        self._layout = Layout((1,)) if is_local else node_layout(self._config, gpu_count())
        self._lock = threading.Lock()
        self._nodes: dict[int, RemoteNode] = {}
        self._fault: str | None = None
        self._starters: list[tuple[list[str], subprocess.Popen[bytes]]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the agents run
        self._closed = False
        self._started = False
        self.address = self._layout.address
        """Where the ranks meet."""
        if len(self._layout.ranks) > 1:
            self._token = _token(self._config)
            self._server = _listen(self._config, self._layout)
            self._hosts = tempfile.NamedTemporaryFile("w", prefix="hosts-")  # noqa: SIM115
            self.address = self._server.getsockname()[0]
            threading.Thread(target=self._accept, daemon=True).start()

    def nodes(self) -> list[RemoteNode]:
        """The other nodes by number; starts their agents and waits until all have connected.

        Raises:
            StageError: a node is lost, does not connect in time, or differs from this machine.
        """
        if len(self._layout.ranks) == 1:
            return []
        if not self._started:
            self._start()
        self._await(self._config.start_timeout_s)
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        for node in nodes:
            if node.lost is not None:
                raise StageError(f"{node.lost}. Fix: check that node; run the same command again")
        return nodes

    def close(self, code: int) -> None:
        """End the agents with an exit code."""
        if len(self._layout.ranks) == 1 or self._closed:
            return
        if self._config.mode == "rank_env":
            with suppress(StageError):
                self._await(min(CLOSE_S, self._config.start_timeout_s))
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for node in list(self._nodes.values()):  # one may be added meanwhile
            with suppress(OSError):
                node.link.send("goodbye", code=code)
        deadline = time.monotonic() + (GOODBYE_S if self._nodes else 0)
        for _, starter in self._starters:
            with suppress(subprocess.TimeoutExpired):
                starter.wait(max(0, deadline - time.monotonic()))
            kill_group(starter)
        self._hosts.close()

    def _start(self) -> None:
        self._started = True
        for command, environment in starting_commands(
            self._config, self._layout, self._agent(), self._hosts
        ):
            process = start(
                command,
                environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            self._starters.append((command, process))

    def _agent(self) -> list[str]:
        config, port = self._config, self._server.getsockname()[1]
        options = {
            "driver": f"{self.address}:{port}",
            "timeout": f"{config.node_timeout_s:g}",
            "start-timeout": f"{config.start_timeout_s:g}",
            "token": self._token,
        }
        return [AGENT, *(f"--{name}={value}" for name, value in options.items())]

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._nodes) < len(self._layout.ranks) - 1:
            if self._fault is not None:
                raise StageError(self._fault)
            for started, starter in self._starters:
                if starter.poll():
                    command = shlex.join(started).replace(self._token, "...")
                    raise StageError(
                        f"launch.mode: found exit code {starter.returncode} of the command that "
                        f"starts the other nodes, {command}. Its output ends with\n{self._tail()}"
                    )
            if time.monotonic() > deadline:
                expected = len(self._layout.ranks) - 1
                tail = self._tail()
                output = f"; the output of the command ends with\n{tail}" if tail else ""
                raise StageError(
                    f"launch.start_timeout_s: found {len(self._nodes)} of {expected} other nodes "
                    f"connected after {seconds:g} s{output}. Fix: check that they start, and "
                    f"that they reach {self.address}:{self._server.getsockname()[1]}"
                )
            time.sleep(POLL_S)

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-20:]).replace(self._token, "...")

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(connection, address[0]), daemon=True).start()

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Add a node, unless the other side does not know the secret or differs."""
        try:
            link = Link(connection, self._token, driver=True, timeout_s=self._config.node_timeout_s)
            hello = link.expect("hello")
            hello["ahead_s"] = hello["time"] - time.time()
        except (PipelineError, OSError):  # not an agent of this run
            return
        with self._lock:
            number = hello["number"] or len(self._nodes) + 1
            fault = self._fault_of(number, hello)
            if fault is not None:
                self._fault = f"node {number} ({hello['host']}, {address}): {fault}"
                with suppress(OSError):
                    link.send("refused", reason=self._fault)
                return
            host = f"{hello['host']}, {address}"
            self._nodes[number] = RemoteNode(link, number, self._layout.ranks_of(number), host)

    def _fault_of(self, number: int, hello: dict[str, Any]) -> str | None:
        """Why a node cannot take part, or None."""
        count = len(self._layout.ranks)
        if not 1 <= number < count:
            return f"found number {number}, expected one from 1 to {count - 1}"
        if number in self._nodes:
            return "found a second node with this number"
        own, ranks = description(), self._layout.ranks[number]
        for name in ("python", "code", "versions"):
            if hello[name] != own[name]:
                return (
                    f"{name}: found {_shown(hello[name])}, expected {_shown(own[name])} as on the "
                    "driver's node. Fix: install the same environment on all nodes"
                )
        if (hello["gpus"] > 0) != (own["gpus"] > 0) or 0 < hello["gpus"] < ranks:
            return (
                f"found {hello['gpus']} GPUs for {ranks} ranks; the driver's node has "
                f"{own['gpus']}. Fix: set launch.processes or the slots of the hostfile"
            )
        if abs(hello["ahead_s"]) > SKEW_S:
            return (
                f"found a clock that differs by {hello['ahead_s']:.0f} s, expected at most "
                f"{SKEW_S:g} s. Fix: synchronise the clocks (NTP)"
            )
        return None


def serve_other_node(config: LaunchConfig) -> None:
    """End this process after its part of the run, unless it is the driver.

    With `rank_env`, the scheduler starts `kedro run` on every node. That of node 0 drives the run.
    """
    if config.mode != "rank_env":
        return
    layout = node_layout(config, gpu_count())
    if layout.is_idle:
        sys.exit(0)
    if layout.node > 0:
        code = serve(
            (layout.address, config.port),
            _token(config),
            number=layout.node,
            timeout_s=config.node_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )
        sys.exit(code)


def starting_commands(
    config: LaunchConfig, layout: Layout, agent: list[str], hosts: IO[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The commands that start the agents, each with its environment.

    `agent` is their module; `hosts` is an empty file for the names of their hosts.
    """
    # DeepSpeed writes variables with PYTHON or MLFLOW in their names on the command lines.
    environment = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
    environment["PYTHONSAFEPATH"] = "1"  # see NodeProgram; DeepSpeed writes it there, too
    if config.mode == "hostfile":
        hosts.writelines(f"{host} slots=1\n" for host in layout.hosts[1:])
        hosts.flush()
        runner = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hosts.name}"]
        options = [
            "--force_multi",  # even for a single other node
            f"--launcher={config.launcher}",
            *([f"--launcher_args={config.launcher_args}"] if config.launcher_args else []),
            *([] if config.launcher == "pdsh" else ["--no_ssh_check"]),
            f"--master_addr={layout.address}",  # otherwise DeepSpeed asks the first host
            "--no_local_rank",
            "--module",
        ]
        yield [*runner, *options, *agent, "--all-gpus"], environment
    if config.mode == "command":
        template = str(config.command)
        command = shlex.join([sys.executable, "-P", "-m", *agent])
        if "{node}" not in template:
            yield shlex.split(template.replace("{command}", command)), environment
        else:
            for number in range(1, len(layout.ranks)):
                text = template.replace("{command}", f"{command} --node={number}")
                yield shlex.split(text.replace("{node}", str(number))), environment


def _token(config: LaunchConfig) -> str:
    if config.mode != "rank_env":
        return os.environ.get(TOKEN) or secrets.token_hex(16)
    if not os.environ.get(TOKEN):
        raise ConfigError(
            f"{TOKEN}: found nothing, expected a secret that all nodes share (launch.mode: "
            f"rank_env). Fix: export {TOKEN}=$(openssl rand -hex 16) before the scheduler starts "
            "the nodes"
        )
    return os.environ[TOKEN]


def _listen(config: LaunchConfig, layout: Layout) -> socket.socket:
    """A server on one address of this machine. With rank_env, the port is known beforehand."""
    try:
        address = socket.gethostbyname(layout.address)
        if address.startswith("127.") and address != layout.address:
            raise OSError(f"it is {address}, which other machines cannot reach; see /etc/hosts")
        return socket.create_server((address, config.port), backlog=len(layout.ranks))
    except OSError as error:
        raise ConfigError(
            f"launch.address: found {layout.address}, port {config.port} (launch.port), expected "
            f"an address of this machine with a free port ({error}). Fix: start `kedro run` on the "
            "first node, or set launch.address and launch.port"
        ) from error


def _shown(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
